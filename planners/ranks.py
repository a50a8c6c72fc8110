"""Instances in rank order: neighbours in rank are neighbours in hardware, so that a group is a run of ranks."""

import re
from collections.abc import Iterable

from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.snapshot import InstanceSnapshot

_DIGITS = re.compile(r"(\d+)")


def rank_order(instances: Iterable[InstanceSnapshot]) -> tuple[InstanceId, ...]:
    """Slots ordered by node, then by device on the node, then by slot; the position is the rank.

    Instances whose place is not known yet (no node) come last, so that they split no node's run.
    Device indices compare as numbers: "cuda:2" is before "cuda:10".
    """
    ordered = sorted(
        instances,
        key=lambda i: (not i.device.node_id, i.device.node_id, _natural(i.device.device), i.instance_id),
    )
    return tuple(i.instance_id for i in ordered)


def _natural(name: str) -> tuple[tuple[str, int], ...]:
    """`"cuda:10" -> (("cuda:", 10), ("", 0))`."""
    parts = _DIGITS.split(name)
    return tuple((text, int(number)) for text, number in zip(parts[::2], [*parts[1::2], "0"], strict=True))
