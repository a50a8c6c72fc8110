"""Logical blocks on device and host between steps: what is known of them, and what moves beside the computation.

What a step needs of them is in `tiered.py`. This part knows blocks, and neither requests nor steps:

    bring            blocks come back to the device, where there is room
    write_behind     full blocks get a copy on the host, so that they can leave without a wait
    place            full blocks are on the host alone in some layers
    claim            blocks get a place, to be written from outside of a step
    forget           blocks hold nothing any more
"""

from collections.abc import Callable, Sequence

import numpy as np

from pengserve.replicas.kv.copies import Copies, CopyEngine, Priority
from pengserve.replicas.kv.host_tier import HostTier, LentRows
from pengserve.replicas.kv.placement import Placement, Use, Uses
from pengserve.replicas.kv.pool import DevicePool
from pengserve.replicas.kv.room import Room, TierCounts
from pengserve.replicas.kv.traffic import Traffic


class TieredBlocks:
    """Belongs to the step thread."""

    def __init__(
        self,
        pool: DevicePool,
        host: HostTier | LentRows,
        *,
        num_blocks: int,
        block_size: int,
        link_bytes_per_s: float = 0.0,
        engine: Copies | None = None,
        counts: TierCounts | None = None,
    ) -> None:
        """
        Args:
            num_blocks: logical ones, the null block included.
            block_size: tokens of a block.
            engine: what copies; one over a link of `link_bytes_per_s` where there is none.
            counts: to be counted on.
        """
        self.pool, self.block_size = pool, block_size
        if engine is None:
            assert isinstance(host, HostTier)
            engine = CopyEngine(pool, host, link_bytes_per_s)
        self.engine = engine
        self.counts = counts or TierCounts()
        self.step = 0
        self._have(host, num_blocks)
        self._taken = np.zeros(num_blocks, dtype=np.int64)  # by block: what `take_copied` has given
        self._on_claim: Callable[[np.ndarray], None] = lambda blocks: None

    def _have(self, host: HostTier | LentRows, num_blocks: int) -> None:
        """All cells and rows are free."""
        self.host = host
        self.placement = Placement(self.pool, host, num_blocks)
        self.traffic = Traffic(self.engine, self.pool, host, num_blocks)
        self.room = Room(self.pool, host, self.placement, self.traffic, self.counts)

    def watch_uses(self, uses: Uses, on_claim: Callable[[np.ndarray], None] = lambda blocks: None) -> None:
        """Asks `uses` what the scheduler's pool says of each block; without it, all are held.

        Args:
            on_claim: hears of blocks that are about to be written from outside of a step.
        """
        self.room.uses, self._on_claim = uses, on_claim

    def settle(self) -> None:
        """Takes note of the copies that have ended."""
        if self.engine.has_news:
            self.traffic.settle()

    def touch(self, blocks: np.ndarray) -> None:
        """The step before has used these blocks: they leave the device after others."""
        self.placement.used[blocks] = self.step

    # Copies beside steps ----------------------------------------------------------------------------------------------

    def claim(self, blocks: np.ndarray) -> None:
        """Blocks are about to be written from outside of a step: each has a place in every layer from now on.

        Raises:
            EngineError: there is none, on neither side.
        """
        self.placement.used[blocks] = self.step
        self._on_claim(blocks)
        self.room.claim(blocks)

    def num_away(self, blocks: np.ndarray) -> int:
        """Cells of blocks that are not on the device."""
        return self.placement.num_away(blocks)

    def num_copied(self, blocks: np.ndarray) -> np.ndarray:
        """Layers of each block that were copied so far, either way, and those that the next step brings back."""
        coming = (self.placement.index[:, blocks] == 0) & ~self.placement.is_away[:, blocks]
        found: np.ndarray = self.traffic.copied[blocks] + coming.sum(axis=0)
        return found

    def take_copied(self, blocks: np.ndarray, before: np.ndarray) -> int:
        """Cells of these blocks that were copied since `num_copied` gave `before`, and are not taken yet.

        Requests share blocks: each copy counts once.
        """
        now, taken = self.num_copied(blocks), self._taken[blocks]
        self._taken[blocks] = np.maximum(now, taken)
        return int(np.maximum(now - np.maximum(before, taken), 0).sum())

    def bring(self, blocks: np.ndarray, keep: np.ndarray) -> bool:
        """Starts to bring blocks back to the device beside the steps; whether that was needed and there was room.

        Layers in which `place` keeps them on the host stay there.

        Args:
            keep: blocks that do not leave the device for it.
        """
        self.traffic.settle()
        blocks = np.unique(blocks)
        still = blocks[self.traffic.in_flight[blocks] == 0]
        num_coming = self.placement.num_coming(still)
        if not num_coming:
            return False
        self.placement.used[blocks] = self.step  # else they would be the first to leave again
        self.room.make_room(num_coming, np.concatenate([still, keep]))
        if num_coming > self.placement.num_free:
            return False
        self.room.bring(still, Priority.BRING)
        return True

    def bring_held(self, blocks: np.ndarray) -> None:
        """As `bring`, of those that have KV still and that a request has: others had them a moment ago."""
        is_held = self.placement.exists(blocks) & (self.room.uses()[blocks] == Use.HELD)
        self.bring(blocks[is_held], blocks)

    def is_moving(self, blocks: np.ndarray) -> bool:
        """Whether a copy of these blocks is under way."""
        self.traffic.settle()
        return bool(self.traffic.in_flight[blocks].any())

    def write_behind(self, blocks: np.ndarray) -> None:
        """Starts to copy full blocks to the host, so that they can leave the device later without a wait."""
        placement = self.placement
        self.traffic.settle()
        blocks = np.unique(blocks)
        self.touch(blocks)
        blocks = blocks[(self.traffic.in_flight[blocks] == 0) & (placement.index[:, blocks] != 0).all(axis=0)]
        blocks = blocks[~placement.on_host[:, blocks].all(axis=0)]
        blocks = placement.take_rows(blocks)
        if len(blocks):
            self.room.save([blocks] * self.pool.num_layers, Priority.BEHIND, wait=False)

    def place(self, blocks: np.ndarray, layers: Sequence[int]) -> None:
        """Says that full blocks are to be on the host alone in these layers, and on the device in all others.

        They leave the device as soon as the host has them. A step that reads them has them staged. What is to be on the
        device comes back with the next step that reads it.
        """
        placement = self.placement
        self.traffic.settle()
        blocks = np.unique(blocks)
        placement.is_away[:, blocks] = False
        self.write_behind(blocks)
        for layer in layers:
            placement.is_away[layer, blocks] = True
            self.room.leave(layer, blocks)

    # Figures and laws -------------------------------------------------------------------------------------------------

    def note_hits(self, blocks: np.ndarray, block_size: int) -> None:
        """A request begins with these blocks of so many tokens, which are cached prefixes."""
        self.counts.hit_tokens += block_size * int((self.placement.index[:, blocks] == 0).any(axis=0).sum())

    def figures(self) -> dict[str, int | float]:
        """Figures and totals, by their names in `InstanceStats`."""
        placement, counts, moved = self.placement, self.counts, self.engine.moved_bytes
        cells = self.pool.num_cells - self.pool.num_layers - placement.num_free
        return {
            "device_blocks": self.pool.num_blocks - 1,
            "device_blocks_used": -(-cells // self.pool.num_layers),
            "host_blocks": self.host.num_rows,
            "host_blocks_used": self.host.num_rows - placement.num_free_rows,
            "total_host_hits": counts.hit_tokens,
            "total_parked": counts.parks,
            "total_displaced": counts.displaced,
            "total_staged_bytes": moved[False, Priority.STAGE],
            "total_brought_bytes": moved[False, Priority.BRING],
            "total_evicted_bytes": moved[True, Priority.EVICT] + moved[True, Priority.STAGE],  # some were waited for
            "total_behind_bytes": moved[True, Priority.BEHIND],
            "total_reused_bytes": counts.reused * self.pool.block_bytes,
            "total_copy_wait_s": counts.stall_s,
        }

    def forget_all(self) -> None:
        """No block holds anything any more: neither a request nor a cached prefix is left."""
        self.traffic.cancel(self.traffic.copies())
        self.forget(np.arange(1, self.placement.num_blocks))

    def forget(self, blocks: np.ndarray) -> None:
        """These blocks hold nothing any more. No copy of them is under way."""
        self.placement.drop_all(blocks)
        self.placement.free_rows(blocks)

    def check(self) -> tuple[str, ...]:
        """Laws that are broken, in sentences; between two steps."""
        self.traffic.settle()
        moving = [copy.cells for copy in self.traffic.copies() if not copy.to_host]
        elsewhere = np.concatenate(moving) if moving else np.zeros(0, dtype=np.int64)
        return (*self.placement.check(elsewhere), *self.traffic.check())

    @property
    def failure(self) -> str:
        """A sentence, once a copy has failed: `give_up` is what is left to do. Empty: none has."""
        return self.engine.failure

    def give_up(self) -> None:
        """There is no host from now on, and no block holds anything. Blocks beyond the device's may not be used."""
        self.close()
        self._begin_anew(HostTier(self.pool.num_layers, 0, self.pool.block_bytes))

    def clear(self) -> None:
        """No block holds anything, also where copies are under way."""
        self.traffic.cancel(self.traffic.copies())
        self._begin_anew(self.host)

    def _begin_anew(self, host: HostTier | LentRows) -> None:
        self.engine.finished()  # what has ended since the last look was of the tables that go now
        version = self.placement.version
        self._have(host, self.placement.num_blocks)
        self.placement.version = version + 1  # nothing that was shown of it is right

    def close(self) -> None:
        """Ends the copies. The memory is the caller's to close."""
        self.engine.close()
