"""Where each logical block of a lane is, layer by layer.

A lane's scheduler hands out logical blocks. The lane's table on each member says which cell that is in each layer.
While all layers agree, one row serves all of them.
"""

from collections.abc import Sequence

import numpy as np

from pengserve.replicas.kv.ledger import Cells


class CellTable:
    """One lane's logical ids on one member, `[0, num_blocks)`; 0 is the null block on both sides.

    Raises ValueError where a block would be leased twice, or released though it is not leased.
    """

    def __init__(self, num_blocks: int) -> None:
        self._rows = np.zeros((1, num_blocks), dtype=np.int32)  # [1 or layers, logical]; 0: not leased

    @property
    def is_uniform(self) -> bool:
        """Whether each logical block is the same block in all layers."""
        return len(self._rows) == 1

    def lease(self, logical_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Backs `logical_ids` with `block_ids`, in order, in all layers."""
        self._make_room(max(logical_ids, default=0))
        if len(logical_ids) != len(block_ids) or self._rows[:, list(logical_ids)].any():
            raise ValueError(f"logical blocks {logical_ids} cannot take {block_ids}")
        self._rows[:, list(logical_ids)] = block_ids

    def _make_room(self, logical_id: int) -> None:
        """Members with more memory of the host have more blocks: the leader's ids may go beyond this member's."""
        missing = logical_id + 1 - self._rows.shape[1]
        if missing > 0:
            self._rows = np.pad(self._rows, ((0, 0), (0, missing)))

    def place(self, layer: int, num_layers: int, logical_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Backs `logical_ids`, which are leased, with other blocks in this one layer of `num_layers`."""
        ids = list(logical_ids)
        if len(ids) != len(block_ids) or not self._rows[:, ids].all():
            raise ValueError(f"logical blocks {logical_ids} cannot move to {block_ids}")
        if self.is_uniform:
            self._rows = np.repeat(self._rows, num_layers, axis=0)
        self._rows[layer, ids] = block_ids
        if (self._rows == self._rows[0]).all():
            self._rows = self._rows[:1].copy()

    def release(self, logical_ids: Sequence[int]) -> list[int]:
        """Takes the backing away; returns the blocks, in order, where all layers have the same."""
        block_ids = self.physical(logical_ids)
        if not all(block_ids):
            raise ValueError(f"some of the logical blocks {logical_ids} are not leased")
        self._rows[:, list(logical_ids)] = 0
        return block_ids

    def physical(self, logical_ids: Sequence[int]) -> list[int]:
        """The blocks of `logical_ids`, in order, where all layers have the same."""
        if not len(logical_ids):
            return []
        rows = self._rows[:, list(logical_ids)]
        if len(rows) > 1 and (rows != rows[0]).any():
            raise ValueError(f"logical blocks {logical_ids} are at different places in different layers; ask for cells")
        found: list[int] = rows[0].tolist()
        return found

    def cells(self, layer: int, logical_ids: Sequence[int]) -> Cells:
        """The cells of `logical_ids` in one layer, in order."""
        row = self._rows[0 if self.is_uniform else layer]
        return Cells((layer, layer + 1), row[list(logical_ids)].tolist() if len(logical_ids) else [])

    def backing(self) -> np.ndarray:
        """The block behind each logical id where all layers have the same, 0 where it is not leased: `[num_blocks]`."""
        return self._rows[0]

    def leased(self) -> list[int]:
        """All logical ids that are backed, ascending."""
        ids: list[int] = np.flatnonzero(self._rows[0]).tolist()
        return ids
