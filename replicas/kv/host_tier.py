"""The host's part of an instance's KV: rows, each with room for one logical block in all layers."""

import copy
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from pengserve.replicas.memory.arena.free_chunks import FreeChunks


class HostCells(Protocol):
    """KV on the host, in rows that the caller numbers."""

    cells: torch.Tensor  # uint8 [n, block_bytes]

    def at(self, layer: int, rows: np.ndarray) -> np.ndarray:
        """Where these rows' cells of one layer are among `cells`, int64."""


class HostRows:
    """Who has which rows, without their memory. A request's rows lie in as few runs as can be (FastSwitch section 3.1:
    block groups).
    """

    def __init__(self, num_rows: int, block_bytes: int) -> None:
        self.num_rows, self.block_bytes = num_rows, block_bytes
        self._free = FreeChunks(num_rows)
        self._lent: set[int] = set()

    @property
    def num_free(self) -> int:
        """Rows that no block has."""
        return len(self._free)

    @property
    def most_rows(self) -> int:
        """Rows that there can ever be: all numbers are below it."""
        return self.num_rows

    def rows(self) -> np.ndarray:
        """All rows that there are, ascending."""
        return np.arange(self.num_rows)

    def take(self, count: int) -> np.ndarray:
        """`count` free rows in as few runs as can be. Raises ValueError where there are not so many."""
        return np.array(self._free.take(count), dtype=np.int64)

    def give(self, rows: Sequence[int] | np.ndarray) -> None:
        """Frees rows."""
        self._free.give(int(row) for row in rows)

    def clear(self, rows: np.ndarray) -> None:
        """Rows with memory hold zeros from now on."""

    @property
    def free_rows(self) -> list[int]:
        """The free rows, ascending."""
        return list(self._free)

    def lend(self, count: int) -> np.ndarray:
        """As `take`, to a lane that keeps other than `dp` blocks in them, until `take_back`."""
        rows = self.take(count)
        self._lent.update(rows.tolist())
        return rows

    def take_back(self, rows: np.ndarray) -> None:
        """Ends a loan."""
        self._lent.difference_update(rows.tolist())
        self.give(rows)

    @property
    def lent_rows(self) -> list[int]:
        """The rows that are lent."""
        return sorted(self._lent)


class HostTier(HostRows):
    """Rows with memory."""

    def __init__(
        self, num_layers: int, num_rows: int, block_bytes: int, *, is_pinned: bool = False, path: str | None = None
    ) -> None:
        """
        Args:
            is_pinned: the device copies to and from it directly; CUDA alone.
            path: a file to keep it in instead of memory.

        Raises:
            RuntimeError: the system does not give the memory.
        """
        super().__init__(num_rows, block_bytes)
        size = num_layers * num_rows * block_bytes
        if path is not None:
            flat = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        else:
            flat = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)  # pages come with the first write
        self.memory = flat.view(num_layers, num_rows, block_bytes)
        """uint8 `[num_layers, num_rows, block_bytes]`."""
        self.cells = self.memory.view(-1, block_bytes)

    def clear(self, rows: np.ndarray) -> None:
        """Rows hold zeros from now on."""
        self.memory[:, torch.from_numpy(rows)] = 0

    def at(self, layer: int, rows: np.ndarray) -> np.ndarray:
        """Where these rows' cells of one layer are among `cells`."""
        places: np.ndarray = layer * self.num_rows + rows
        return places


class LentRows(HostRows):
    """Rows for the layers of a pipeline's stage, on rows that the host tier of `dp` lends: several on each."""

    def __init__(self, host: HostTier, num_layers: int, per_row: int) -> None:
        """
        Args:
            num_layers: of the stage.
            per_row: of its rows on one of `host`'s.
        """
        super().__init__(0, host.block_bytes)
        self.cells, self.per_row = host.cells, per_row
        self._host, self._num_layers, self._most_rows = host, num_layers, host.num_rows * per_row
        self._lender = np.full(host.num_rows, -1, dtype=np.int64)  # by group of `per_row` rows: the host's row

    @property
    def most_rows(self) -> int:
        """As of any."""
        return self._most_rows

    def rows(self) -> np.ndarray:
        """As of any."""
        return self._rows_of(np.flatnonzero(self._lender != -1))

    def _rows_of(self, groups: np.ndarray) -> np.ndarray:
        found: np.ndarray = (groups[:, None] * self.per_row + np.arange(self.per_row)).ravel()
        return found

    def borrow(self) -> None:
        """All rows that are free in `dp` are rows of the stage from now on."""
        groups = np.flatnonzero(self._lender == -1)[: self._host.num_free]
        if len(groups):
            self._lender[groups] = self._host.lend(len(groups))
            rows = self._rows_of(groups)
            self.give(rows)
            self.num_rows += len(rows)

    def give_back(self) -> None:
        """Rows of `dp` on which all of the stage's are free are its own again."""
        free, is_free = np.array(self.free_rows, dtype=np.int64), np.zeros(self._most_rows, dtype=bool)
        is_free[free] = True
        groups = np.flatnonzero(is_free.reshape(-1, self.per_row).all(axis=1) & (self._lender != -1))
        if len(groups):
            self._free = FreeChunks(0)
            self.give(free[~np.isin(free, self._rows_of(groups))])
            self._host.take_back(self._lender[groups])
            self._lender[groups] = -1
            self.num_rows -= len(groups) * self.per_row

    def give_all(self) -> None:
        """No row holds anything any more: all are `dp`'s."""
        lent = self._lender != -1
        self._host.take_back(self._lender[lent])
        self._forget()

    def hand_over(self) -> "LentRows":
        """These rows as another's, who gives them back. Here there are none from now on."""
        other = copy.copy(self)
        self._forget()
        return other

    def _forget(self) -> None:
        self._lender = np.full(len(self._lender), -1, dtype=np.int64)
        self._free, self.num_rows = FreeChunks(0), 0

    def clear(self, rows: np.ndarray) -> None:
        """Rows hold zeros from now on."""
        for layer in range(self._num_layers):
            self.cells[torch.from_numpy(self.at(layer, rows))] = 0

    def at(self, layer: int, rows: np.ndarray) -> np.ndarray:
        """Where these rows' cells of one of the stage's layers, counted from its first, are among `cells`."""
        groups, parts = np.divmod(rows, self.per_row)
        places: np.ndarray = (parts * self._num_layers + layer) * self._host.num_rows + self._lender[groups]
        return places


def num_runs(sources: np.ndarray, targets: np.ndarray) -> int:
    """In how many runs a copy goes from `sources` to `targets`: neighbours on both sides are one copy."""
    if not len(sources):
        return 0
    return 1 + int(np.count_nonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)))


def copy_runs(sources: np.ndarray, targets: np.ndarray) -> list[tuple[int, int, int]]:
    """The runs: `(first source, first target, count)`."""
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    starts = [0, *breaks.tolist()]
    stops = [*breaks.tolist(), len(sources)]
    return [(int(sources[a]), int(targets[a]), b - a) for a, b in zip(starts, stops, strict=True) if b > a]
