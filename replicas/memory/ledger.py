"""Which lane holds which KV block of an instance. One ledger an instance: leased + free = all, always.

    (lane, logical block) --table of the lane--> physical block --> bytes in every layer's KV tensor

The `dp` lane's logical ids are the physical ids, and it holds what no other lane has leased. Other lanes have
a table.
"""

from collections.abc import Iterable, Sequence

import numpy as np

NULL_BLOCK = 0  # vLLM's: never leased, the same in all lanes


class BlockLedger:
    """Leases of physical blocks `[1, num_blocks)` to lanes. Block 0 is the null block of every lane.

    Raises ValueError where a block would get two owners, or none: a programmer's mistake, never an effect of load.
    """

    def __init__(self, num_blocks: int, first_lane: str) -> None:
        self.num_blocks = num_blocks
        self._owners: list[str] = [first_lane] * num_blocks
        self._counts: dict[str, int] = {first_lane: num_blocks - 1}

    def move(self, block_ids: Iterable[int], source: str, target: str) -> None:
        """Moves leases from lane `source` to lane `target`."""
        ids = list(block_ids)
        for block_id in ids:
            if block_id == NULL_BLOCK or self._owners[block_id] != source:
                raise ValueError(f"block {block_id} belongs to {self._owners[block_id]}, not to {source}")
            self._owners[block_id] = target
        self._counts[source] = self._counts.get(source, 0) - len(ids)
        self._counts[target] = self._counts.get(target, 0) + len(ids)

    def num_leased(self, lane: str) -> int:
        """Blocks that `lane` holds, used or not."""
        return self._counts.get(lane, 0)

    def leased(self, lane: str) -> list[int]:
        """The blocks that `lane` holds, ascending."""
        return [block_id for block_id, owner in enumerate(self._owners) if owner == lane and block_id != NULL_BLOCK]

    def check(self) -> tuple[str, ...]:
        """What is wrong, in sentences; empty when every block but the null block has exactly one owner."""
        counted: dict[str, int] = {}
        for owner in self._owners[1:]:
            counted[owner] = counted.get(owner, 0) + 1
        booked = {lane: count for lane, count in self._counts.items() if count}
        return () if counted == booked else (f"the ledger counts {booked} but the blocks say {counted}",)


class BlockTable:
    """One lane's logical ids on one member, `[0, num_blocks)`; 0 is the null block on both sides."""

    def __init__(self, num_blocks: int) -> None:
        self._physical = np.zeros(num_blocks, dtype=np.int32)  # 0: not leased

    def lease(self, logical_ids: Sequence[int], physical_ids: Sequence[int]) -> None:
        """Backs `logical_ids` with `physical_ids`, in order."""
        if len(logical_ids) != len(physical_ids) or self._physical[list(logical_ids)].any():
            raise ValueError(f"logical blocks {logical_ids} cannot take {physical_ids}")
        self._physical[list(logical_ids)] = physical_ids

    def release(self, logical_ids: Sequence[int]) -> list[int]:
        """Takes the backing away; returns the physical ids, in order."""
        physical: list[int] = self.physical(logical_ids)
        if not all(physical):
            raise ValueError(f"some of the logical blocks {logical_ids} are not leased")
        self._physical[list(logical_ids)] = 0
        return physical

    def physical(self, logical_ids: Sequence[int]) -> list[int]:
        """Physical ids of `logical_ids`, in order."""
        found: list[int] = self._physical[list(logical_ids)].tolist() if len(logical_ids) else []
        return found

    def leased(self) -> list[int]:
        """All logical ids that are backed, ascending."""
        ids: list[int] = np.flatnonzero(self._physical).tolist()
        return ids
