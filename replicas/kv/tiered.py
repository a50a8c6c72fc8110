"""KV of more logical blocks than the device holds: what a step needs of it comes in time, what is not needed leaves.

vLLM's scheduler hands out logical blocks. Before each step `begin_step` says where the blocks are that the step reads
and writes:

    all at home          None: vLLM's own tables are right
    all uniform          one table for all layers
    some on the host     a table for each layer; their KV is staged layer by layer, ahead of the computation

Blocks that are written are on the device in all layers; so only full blocks, which never change, are ever staged, and
a copy on the host stays valid as long as its block lives (FastSwitch section 3.3: a second swap-out copies nothing).
What was staged stays on the device where there is room. What must leave to make room are blocks that no request of the
step has, the least recently used first; then, if need be, blocks of the step itself, equally many in each layer
(LayerKV section 3.1). What moves between steps is in `tiered_blocks.py`.
"""

import time
from dataclasses import dataclass, field

import numpy as np

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.kv.copies import Copy, Priority, require_moved
from pengserve.replicas.kv.host_tier import HostTier, LentRows
from pengserve.replicas.kv.placement import NO_ROW
from pengserve.replicas.kv.staging import turns
from pengserve.replicas.kv.tiered_blocks import TieredBlocks


@dataclass(slots=True)
class StepTables:
    """Where the blocks of one step are: `index[0 or layer, logical block]`."""

    index: np.ndarray  # int32 [1 or layers, logical]
    waits: dict[int, Copy] = field(default_factory=dict)  # by layer
    ring: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    staged: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)  # (layer, blocks, cells)
    followers: dict[int, list[Copy]] = field(default_factory=dict)  # by the layer that must be read before
    keeps: bool = True  # no cell of the ring was used twice

    @property
    def is_layered(self) -> bool:
        """Whether layers have tables of their own, or wait for copies: a stage may have one layer alone."""
        return len(self.index) > 1 or bool(self.waits)


class TieredKv(TieredBlocks):
    """What steps need of these blocks. Mechanism alone: it knows blocks, and no request."""

    _current: StepTables | None = None  # of the step under way, where layers wait

    def _have(self, host: HostTier | LentRows, num_blocks: int) -> None:
        super()._have(host, num_blocks)
        self._current = None

    # Steps ------------------------------------------------------------------------------------------------------------

    def begin_step(
        self, tables: np.ndarray, counts: np.ndarray, starts: np.ndarray, block_size: int = 0
    ) -> StepTables | None:
        """Makes all that a step needs be on the device, or on its way there; None where vLLM's own tables are right.

        Args:
            tables: logical blocks of each request in order, int `[requests, at least counts.max()]`.
            counts: blocks of each request that the step reads or writes, `[requests]`.
            starts: tokens of each request that were computed before, `[requests]`.
            block_size: tokens of a block where these are not as many as in `dp`.

        Raises:
            EngineError: a copy failed, or the device does not hold what the step needs at once.
        """
        self.step += 1
        size = block_size or self.block_size
        if self.placement.is_plain and not (counts > -(-starts // size)).any():
            return None  # no block begins, and all that there are are at home
        tables = tables[:, : int(counts.max())]
        places = np.arange(tables.shape[1])
        reads = tables[places < counts[:, None]]
        first_new = -(-starts // size)
        is_new = (places >= first_new[:, None]) & (places < counts[:, None])
        fresh = tables[is_new]
        is_open = starts % size != 0
        tails = tables[is_open, starts[is_open] // size]
        placement = self.placement
        placement.used[reads] = self.step
        if len(fresh):
            self._begin(fresh)
        if (placement.row[tails] != NO_ROW).any():
            self._reopen(tails, reads, fresh)
        if placement.is_home[reads].all():
            return None
        self.counts.mapped_steps += 1
        if placement.is_uniform[reads].all():
            return StepTables(placement.index[:1])
        return self._map(np.unique(reads), np.unique(np.concatenate([fresh, tails])))

    def begin_blocks(self, fresh: np.ndarray, *, is_layered: bool) -> bool:
        """As `begin_step`, of a step that reads what the one before it has read, and begins these blocks.

        Args:
            is_layered: layers have tables of their own in that step, so blocks may be anywhere in each.

        Returns whether each of them has a place, and one in all layers unless the step `is_layered`; nothing else has
        moved for it. Else `begin_step` makes room for them.
        """
        placement = self.placement
        if self.traffic.in_flight[fresh].any():
            return False
        self._begin(fresh)
        placement.used[fresh] = self.step
        if placement.is_uniform[fresh].all():
            return True
        absent = fresh[placement.index[0, fresh] == 0]
        if not is_layered or len(absent) * self.pool.num_layers > placement.num_free:
            return False
        self._put_anywhere(absent)
        return True

    def note_step(self, *, is_mapped: bool) -> None:
        """A step for which nothing had to be looked at; whether its KV is not all at home."""
        self.step += 1
        self.counts.mapped_steps += is_mapped

    def wait_layer(self, layer: int) -> None:
        """Waits until what is staged of `layer` is there.

        Raises:
            HostTierError: its copy has failed.
        """
        assert self._current is not None
        copy = self._current.waits.get(layer)
        if copy is None:
            return
        if not copy.done.is_set():
            started_s = time.perf_counter()
            self.engine.wait(copy)
            self.counts.stall_s += time.perf_counter() - started_s
        require_moved((copy,))

    def read_layer(self, layer: int) -> None:
        """The step has read `layer`, or told the device to: its staged cells may take KV of another afterwards."""
        assert self._current is not None
        if followers := self._current.followers.get(layer):
            self.engine.release(followers)

    def end_step(self, *, has_failed: bool = False) -> None:
        """What was staged stays on the device where its cells were not used again.

        Args:
            has_failed: the step has ended before all layers were read. What was staged for it is given up.
        """
        step, self._current = self._current, None
        if step is None or not len(step.ring):
            return
        if has_failed:
            self.traffic.cancel(step.waits.values())
            self.placement.give(step.ring)
            return
        self.traffic.wait(step.waits.values())
        if step.keeps:
            for layer, blocks, cells in step.staged:
                stays = ~self.placement.is_away[layer, blocks]
                self.placement.put(layer, blocks[stays], cells[stays])
                self.placement.give(cells[~stays])
                self.counts.kept += int(stays.sum())
        else:
            self.placement.give(step.ring)

    # Before a step: blocks that are written ---------------------------------------------------------------------------

    def _begin(self, fresh: np.ndarray) -> None:
        """Blocks are written from their first token on: what they held is gone."""
        placement = self.placement
        self.traffic.wait_for(fresh)
        placement.free_rows(fresh)
        here = placement.index[:, fresh] != 0
        if not here.any():
            placement.settle_at_home(fresh)
            return
        placement.drop_all(fresh[here.any(axis=0) & ~here.all(axis=0)])
        placement.settle_at_home(fresh[~here.all(axis=0)])

    def _reopen(self, tails: np.ndarray, reads: np.ndarray, fresh: np.ndarray) -> None:
        """Blocks that are partly full are written on: their copies on the host go stale with that.

        Those that are on the host alone come back now: their next token is written before any layer waits.
        """
        placement = self.placement
        self.traffic.wait_for(tails)
        saved, reads = np.unique(tails[placement.row[tails] != NO_ROW]), np.unique(reads)
        fixed = np.concatenate([fresh, tails])
        if self._room_for(saved, reads):
            self._come_back(saved)
            return
        for index in range(len(saved)):  # the row of each makes room for what has to leave for the next
            block = saved[index : index + 1]
            if not self._room_for(block, reads):
                self.room.thin(self.placement.num_away(block), reads, fixed, areas=(0,))
            self._come_back(block)

    def _room_for(self, blocks: np.ndarray, keep: np.ndarray) -> bool:
        """Frees cells for what is away of `blocks`; whether there are so many now."""
        needed = self.placement.num_away(blocks)
        if self.placement.num_free < needed:
            self.room.make_room(needed, keep)
        return self.placement.num_free >= needed

    def _come_back(self, blocks: np.ndarray) -> None:
        """Brings blocks that are written on back to the device, and gives up their rows."""
        self.placement.is_away[:, blocks] = False
        self.traffic.wait(self.room.bring(blocks, Priority.STAGE))
        self.placement.free_rows(blocks)

    # Before a step: where everything is -------------------------------------------------------------------------------

    def _map(self, reads: np.ndarray, fixed: np.ndarray) -> StepTables:
        """Tables of a step that reads `reads`, and writes `fixed` among them. Both are without repetition."""
        placement = self.placement
        self.traffic.wait_for(reads, coming=True)
        absent = fixed[(placement.index[:, fixed] == 0).any(axis=0)]  # begun in this step: they hold nothing yet
        missing = placement.index[:, reads] == 0
        if missing.any() and int(missing.sum()) > placement.num_free:
            self.room.make_room(int(missing.sum()), reads)
        if len(absent):
            absent = placement.settle_at_home(absent)
            self._scatter(absent, reads, fixed)
        missing = placement.index[:, reads] == 0
        if not missing.any():
            is_uniform = bool(placement.is_uniform[reads].all())
            self._current = StepTables(placement.index[:1] if is_uniform else placement.index)
            return self._current
        if int(missing.sum()) > placement.num_free:
            self.room.thin(0, reads, fixed)
        return self._stage(reads)

    def _scatter(self, absent: np.ndarray, reads: np.ndarray, fixed: np.ndarray) -> None:
        """Gives blocks that are written cells wherever there are some."""
        placement, needed = self.placement, len(absent) * self.pool.num_layers
        if not needed:
            return
        if placement.num_free < needed:
            self.room.thin(needed, reads, fixed)
        self._put_anywhere(absent)

    def _put_anywhere(self, absent: np.ndarray) -> None:
        """Gives blocks that are nowhere on the device free cells, of which there are enough."""
        for layer in range(self.pool.num_layers):
            self.placement.put(layer, absent, self.placement.take(len(absent)))

    def _stage(self, reads: np.ndarray) -> StepTables:
        """Starts the copies of what the step reads and the device does not hold."""
        placement = self.placement
        index = placement.index.copy()
        away = [reads[placement.index[layer, reads] == 0] for layer in range(self.pool.num_layers)]
        counts = [len(blocks) for blocks in away]
        for layer, blocks in enumerate(away):
            if not placement.on_host[layer, blocks].all():
                raise EngineError(f"KV of layer {layer} is neither on the device nor on the host")
        ring = placement.take(min(sum(counts), placement.num_free))
        step = StepTables(index, ring=ring, keeps=len(ring) == sum(counts))
        for turn in turns(counts, len(ring)):
            layer, blocks, cells = turn.layer, away[turn.layer], ring[turn.places]
            index[layer, blocks] = self.pool.index_of(layer, cells)
            step.staged.append((layer, blocks, cells))
            copy = Copy(Priority.STAGE, layer, blocks, cells, placement.row[blocks], to_host=False)
            if turn.after is not None:
                copy.is_ready = False
                step.followers.setdefault(turn.after, []).append(copy)
            step.waits[layer] = copy
        self._current = step
        for copy in step.waits.values():
            self.traffic.submit(copy, _nothing, follows=not copy.is_ready)
        self.counts.staged += sum(counts)
        self.counts.staged_steps += 1
        return step


def _nothing(copy: Copy) -> None:
    """What is staged goes into no table before the step has ended."""
