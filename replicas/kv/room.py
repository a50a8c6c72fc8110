"""Room on the device: what leaves it, and what comes back to it.

Blocks that no request of the step has leave first, the least recently used before others; then blocks of the step
itself, equally many in each layer (LayerKV section 3.1). What leaves is copied to the host unless its copy is there.
"""

from dataclasses import dataclass

import numpy as np

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.kv.copies import Copy, Priority
from pengserve.replicas.kv.host_tier import HostRows
from pengserve.replicas.kv.placement import NO_ROW, Placement, Use, Uses
from pengserve.replicas.kv.pool import DevicePool
from pengserve.replicas.kv.staging import levels
from pengserve.replicas.kv.traffic import Traffic

SPARE_SHARE = 32  # one of so many cells is freed beyond need: to look for cells costs more than to free them


@dataclass(slots=True)
class TierCounts:
    """Totals, in cells (a block of one layer) unless said otherwise."""

    staged: int = 0  # copied to the device for a step that waited for them
    kept: int = 0  # ... of those that stayed there afterwards
    evicted: int = 0  # left the device
    reused: int = 0  # ... of those whose copy on the host was there already
    staged_steps: int = 0  # steps with a staged layer
    mapped_steps: int = 0  # steps with tables of their own
    stall_s: float = 0.0  # that layers waited for their copies
    hit_tokens: int = 0  # of cached prefixes that a request found on the host
    parks: int = 0  # times that a request left the batch with its KV,
    displaced: int = 0  # ... for a more urgent one that took its place


class Room:
    """Makes room, and fills it. Belongs to the step thread."""

    def __init__(
        self, pool: DevicePool, host: HostRows, placement: Placement, traffic: Traffic, counts: TierCounts
    ) -> None:
        self.pool, self.placement, self.traffic, self.counts = pool, placement, traffic, counts
        self._host = host
        self.uses: Uses = lambda: np.full(placement.num_blocks, Use.HELD, dtype=np.uint8)
        self._keep = np.zeros(placement.num_blocks, dtype=bool)

    def make_room(self, needed: int, keep: np.ndarray) -> None:
        """Frees `needed` cells and some for the next steps, as far as blocks other than `keep` have some."""
        placement = self.placement
        self.traffic.settle()
        if placement.num_free >= needed:
            return
        needed += self.pool.num_cells // SPARE_SHARE
        was_moving = bool(self.traffic.copies())  # what was in flight could not leave
        self._take_from_others(needed, keep)
        if placement.num_free < needed and was_moving:
            self._cancel_all_but_stages()
            self._take_from_others(needed, keep)

    def _cancel_all_but_stages(self) -> None:
        self.traffic.cancel([copy for copy in self.traffic.copies() if copy.priority is not Priority.STAGE])

    def _take_from_others(self, needed: int, keep: np.ndarray) -> None:
        placement, uses = self.placement, self.uses()
        candidates = self._drop_dead(keep, uses)
        candidates = candidates[np.argsort(placement.used[candidates], kind="stable")]
        while len(candidates) and placement.num_free < needed:
            sizes = (placement.index[:, candidates] != 0).sum(axis=0)
            count = int(np.searchsorted(np.cumsum(sizes), needed - placement.num_free)) + 1
            self._evict(candidates[:count])
            candidates = candidates[count:]
        next_ones = candidates[: self.pool.num_blocks // SPARE_SHARE]
        self._save_ahead(next_ones[uses[next_ones] == Use.CACHED])

    def _save_ahead(self, prefixes: np.ndarray) -> None:
        """What leaves next is copied to the host beside the steps, which do not wait for it then (FastSwitch section
        3.2: asynchronous swap-out). Prefixes alone: they are full, and no request writes them.
        """
        placement = self.placement
        is_here = (placement.index[:, prefixes] != 0).all(axis=0)
        unsaved = prefixes[is_here & ~placement.on_host[:, prefixes].all(axis=0)]
        self.save([placement.take_rows(unsaved)] * self.pool.num_layers, Priority.BEHIND, wait=False)

    def _drop_dead(self, keep: np.ndarray, uses: np.ndarray) -> np.ndarray:
        """Frees the cells of blocks that are of no use, but not of `keep`; the others that may leave the device."""
        placement = self.placement
        self._keep[:] = False
        self._keep[keep] = True
        movable = (placement.index != 0).any(axis=0) & ~self._keep & (self.traffic.in_flight == 0)
        movable[0] = False
        dead = np.flatnonzero(movable & (uses == Use.DEAD))
        placement.drop_all(dead)
        placement.free_rows(dead)
        return np.flatnonzero(movable & (uses != Use.DEAD))

    def claim(self, blocks: np.ndarray) -> None:
        """Gives blocks a place in each layer, where they have none: on the device as far as there is room, else on the
        host. Where the host is full too, others leave the device.

        Raises:
            EngineError: there is no place.
        """
        placement = self.placement
        self.traffic.wait_for(blocks)
        placement.is_away[:, blocks] = False
        is_lost = ((placement.index[:, blocks] == 0) & ~placement.on_host[:, blocks]).any(axis=0)
        new = blocks[is_lost]  # what they hold is of an earlier use
        if not len(new):
            return
        placement.drop_all(new)
        placement.free_rows(new)
        if placement.num_free < len(new) * self.pool.num_layers:
            self._drop_dead(blocks, self.uses())
        new = self._claim_cells(new)
        if len(new):
            on_host = self._rows_for(new, blocks)
            # What comes may fill a block in part. vLLM's kernels for CPUs multiply the rest by zero, so no NaN may be
            # there; on the device there is none, as all that was there was KV or weights.
            self._host.clear(placement.row[on_host])
            placement.on_host[:, on_host] = True
            new = new[~np.isin(new, on_host)]
        if len(new):
            self.make_room(len(new) * self.pool.num_layers, blocks)
            if len(self._claim_cells(new)):
                raise EngineError(f"there is no place for KV of {len(new)} blocks, on neither device nor host")

    def _claim_cells(self, blocks: np.ndarray) -> np.ndarray:
        """Gives as many of these blocks as there are cells for one in each layer; the others."""
        placement, fitting = self.placement, self.placement.num_free // self.pool.num_layers
        absent = placement.settle_at_home(blocks[:fitting])
        for layer in range(self.pool.num_layers):
            placement.put(layer, absent, placement.take(len(absent)))
        return blocks[fitting:]

    def _evict(self, blocks: np.ndarray) -> None:
        """Takes blocks off the device in all layers; those for which the host has no row stay."""
        placement = self.placement
        unsaved = ((placement.index[:, blocks] != 0) & ~placement.on_host[:, blocks]).any(axis=0)
        able = np.concatenate([blocks[~unsaved], self._rows_for(blocks[unsaved], blocks)])
        self.save([able] * self.pool.num_layers, Priority.EVICT)
        self.counts.evicted += self.pool.num_layers * len(able) - self.placement.num_away(able)
        placement.drop_all(able)

    def _rows_for(self, blocks: np.ndarray, keep: np.ndarray) -> np.ndarray:
        """Gives rows to blocks; those of them that have one now. Blocks of `keep` lose none."""
        self._free_rows_for(int((self.placement.row[blocks] == NO_ROW).sum()), keep)
        return self.placement.take_rows(blocks)

    def _free_rows_for(self, count: int, keep: np.ndarray) -> None:
        """Makes `count` rows free, as far as there are some that are of no use. Blocks of `keep` lose none."""
        for free in (self._free_dead_rows, self._free_spare_rows, self._cancel_others, self._free_spare_rows):
            if count <= self.placement.num_free_rows:
                break
            free(keep)

    def _free_dead_rows(self, keep: np.ndarray) -> None:
        dead = (self.placement.row != NO_ROW) & (self.uses() == Use.DEAD) & (self.traffic.in_flight == 0)
        self.placement.free_rows(np.flatnonzero(dead))

    def _free_spare_rows(self, keep: np.ndarray) -> None:
        spare = self.placement.redundant()
        self.placement.free_rows(spare[(self.traffic.in_flight[spare] == 0) & ~np.isin(spare, keep)])

    def _cancel_others(self, keep: np.ndarray) -> None:
        self.traffic.cancel([copy for copy in self.traffic.copies() if copy.priority is Priority.BEHIND])

    def save(self, by_layer: list[np.ndarray], priority: Priority, *, wait: bool = True) -> None:
        """Copies blocks that have rows to the host, where their copies are not there yet.

        Args:
            by_layer: blocks of each layer.
            wait: whether all copies have ended on return.
        """
        placement, copies = self.placement, []
        for layer, wanted in enumerate(by_layer):
            here = wanted[placement.index[layer, wanted] != 0]
            new = here[~placement.on_host[layer, here]]
            self.counts.reused += (len(here) - len(new)) if wait else 0
            if len(new):
                copy = Copy(priority, layer, new, placement.cells(layer, new), placement.row[new], to_host=True)
                copies.append(self.traffic.submit(copy, self._saved))
        if wait:
            self.traffic.wait(copies)

    def _saved(self, copy: Copy) -> None:
        if not copy.is_cancelled:
            self.placement.on_host[copy.layer, copy.blocks] = True
            self._leave_all(copy.blocks)

    def _leave_all(self, blocks: np.ndarray) -> None:
        """What waited for its copy on the host leaves the device, once nothing else copies the block."""
        is_away = self.placement.is_away
        still = blocks[is_away[:, blocks].any(axis=0) & (self.traffic.in_flight[blocks] == 0)]
        for layer in range(self.pool.num_layers) if len(still) else ():
            self.leave(layer, still[is_away[layer, still]])

    def leave(self, layer: int, blocks: np.ndarray) -> None:
        """Takes blocks that are to be on the host alone off the device in one layer, as far as the host has them."""
        placement = self.placement
        left = blocks[placement.on_host[layer, blocks] & (self.traffic.in_flight[blocks] == 0)]
        num_left = int((placement.index[layer, left] != 0).sum())
        self.counts.evicted += num_left
        self.counts.reused += num_left
        placement.drop(layer, left)

    def thin(self, needed: int, reads: np.ndarray, fixed: np.ndarray, *, areas: tuple[int, ...] = (2, 1)) -> None:
        """Takes full blocks of the step itself off the device, equally many in each layer: they will be staged.

        `needed` cells are to be free beside the ring through which these are staged.

        Args:
            areas: how many layers' worth the ring is to have, the best first.

        Raises:
            EngineError: the step needs more at once than the device has.
        """
        try:
            self._thin(needed, reads, fixed, areas)
        except EngineError:
            # Nothing is to be under way: blocks that are being copied could not leave, nor give up their rows.
            self._cancel_all_but_stages()
            self.traffic.wait(self.traffic.copies())
            self._swap(reads)
            self._thin(needed, reads, fixed, areas)

    def _swap(self, reads: np.ndarray) -> None:
        """Device and host are full: blocks of the step come to the device a few at a time; their rows take others."""
        placement = self.placement
        while True:
            away = reads[(placement.index[:, reads] == 0).any(axis=0)]
            sizes = (placement.index[:, away] == 0).sum(axis=0)
            fitting = int(np.searchsorted(np.cumsum(sizes), placement.num_free, side="right"))
            if not fitting:
                return
            placement.is_away[:, away[:fitting]] = False  # without their rows they are nowhere else
            self.traffic.wait(self.bring(away[:fitting], Priority.STAGE))
            placement.free_rows(away[:fitting])
            self.make_room(int(sizes[fitting:].sum()), reads)

    def _thin(self, needed: int, reads: np.ndarray, fixed: np.ndarray, areas: tuple[int, ...]) -> None:
        placement = self.placement
        self.traffic.wait_for(reads)
        movable = reads[~np.isin(reads, fixed)]
        movable = movable[np.argsort(placement.row[movable] == NO_ROW, kind="stable")]  # first those that have a row
        num_saved = int((placement.row[movable] != NO_ROW).sum())
        counts = (placement.index[:, movable] == 0).sum(axis=1)
        num_free = placement.num_free - needed
        self._free_rows_for(len(movable) - num_saved, movable)
        able = movable[: num_saved + placement.num_free_rows]
        here = placement.index[:, able] != 0
        tried = (levels(counts, here.sum(axis=1), num_free, num_areas) for num_areas in areas)
        leaving = next((found for found in tried if found is not None), None)
        if leaving is None:
            raise EngineError(
                f"a step needs KV of {len(reads)} blocks, of which it writes {len(fixed)}; the device has"
                f" {self.pool.num_blocks} in each layer, and that is too few"
            )
        victims = [able[here[layer]][: int(leaving[layer])] for layer in range(len(leaving))]
        placement.take_rows(able[np.isin(able, np.concatenate(victims))])
        self.save(victims, Priority.EVICT)
        for layer, blocks in enumerate(victims):
            self.counts.evicted += len(blocks)
            placement.drop(layer, blocks)

    def bring(self, blocks: np.ndarray, priority: Priority) -> list[Copy]:
        """Starts to copy blocks to the device in the layers in which they are to be there; there is room for them.

        Raises:
            EngineError: the host does not have one of them.
        """
        placement, copies = self.placement, []
        # Blocks that come back in all layers get one index there, as far as there are some: steps need one table then.
        is_whole = ((placement.index[:, blocks] == 0) & ~placement.is_away[:, blocks]).all(axis=0)
        columns = placement.take_columns(int(np.count_nonzero(is_whole)))
        whole = blocks[is_whole][: len(columns)]
        others = blocks[~np.isin(blocks, whole)]
        for layer in range(self.pool.num_layers):
            rest = others[(placement.index[layer, others] == 0) & ~placement.is_away[layer, others]]
            away = np.concatenate([whole, rest])
            if len(away):
                if not placement.on_host[layer, away].all():
                    raise EngineError(f"KV of layer {layer} is neither on the device nor on the host")
                cells = np.concatenate([placement.cells_at(layer, columns), placement.take(len(rest))])
                copy = Copy(priority, layer, away, cells, placement.row[away], to_host=False)
                copies.append(self.traffic.submit(copy, self._brought))
        return copies

    def _brought(self, copy: Copy) -> None:
        if copy.is_cancelled:
            self.placement.give(copy.cells)
        else:
            self.placement.put(copy.layer, copy.blocks, copy.cells)
