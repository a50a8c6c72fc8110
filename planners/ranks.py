"""Instances in rank order: neighbours in rank are neighbours in hardware, so that a group is a run of ranks."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.snapshot import InstanceSnapshot

_DIGITS = re.compile(r"(\d+)")

T = TypeVar("T")


def rank_order(instances: Iterable[InstanceSnapshot]) -> tuple[InstanceId, ...]:
    """Slots ordered by node, on a node so that groups cross few domains, then by device; the position is the rank.

    Instances whose place is not known yet (no node) come last, so that they split no node's run.
    Device indices compare as numbers: "cuda:2" is before "cuda:10".
    """
    ordered = sorted(
        instances,
        key=lambda i: (not i.device.node_id, i.device.node_id, _natural(i.device.device), i.instance_id),
    )
    nodes = groupby(ordered, key=lambda i: i.device.node_id)
    return tuple(i.instance_id for _, of_node in nodes for i in by_domain(list(of_node), lambda i: i.device.domain))


def by_domain(of_node: Sequence[T], domain_of: Callable[[T], str]) -> list[T]:
    """What is on one node, so that as many aligned runs of 2, 4, 8, ... as possible lie within one domain each.

    Each domain is cut into runs of powers of two, and longer runs come first: then every run begins at a multiple of
    its length. Domains of 5 and 3 give runs of 4, 2, 1 and 1. A single domain keeps its order.
    """
    domains: dict[str, list[T]] = {}
    for one in of_node:
        domains.setdefault(domain_of(one), []).append(one)
    runs: list[list[T]] = []
    for members in domains.values():
        start = 0
        for power in reversed(range(len(members).bit_length())):
            if len(members) >> power & 1:
                runs.append(members[start : start + (1 << power)])
                start += 1 << power
    return [one for run in sorted(runs, key=len, reverse=True) for one in run]


def _natural(name: str) -> tuple[tuple[str, int], ...]:
    """`"cuda:10" -> (("cuda:", 10), ("", 0))`."""
    parts = _DIGITS.split(name)
    return tuple((text, int(number)) for text, number in zip(parts[::2], [*parts[1::2], "0"], strict=True))
