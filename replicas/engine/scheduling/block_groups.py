"""Blocks of a request as vLLM names them: a list for each KV group, of which lanes that share KV have one."""

from collections.abc import Sequence
from typing import TypeVar

BlockGroups = tuple[list[int], ...]
"""vLLM's form: `SchedulerOutput`, `CachedRequestState` and the KV manager have it."""

Block = TypeVar("Block")


def blocks_of(groups: Sequence[list[Block]]) -> list[Block]:
    """The blocks of the one group, in the order of the request's tokens."""
    return groups[0]


def grouped(blocks: Sequence[int]) -> BlockGroups:
    """Inverse of `blocks_of`."""
    return (list(blocks),)
