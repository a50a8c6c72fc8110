"""KV of a pipeline's stage on device and host: the tiers of an instance, over the layers that the stage keeps.

memory      the layers' KV as it stands between weights, side by side; it grows and shrinks beside the steps
rows        on rows that the host tier of `dp` lends
copies      by the engine of `dp`: one link, one thread
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pengserve.planners.layer_sizes import LayerRange, LayerSizes
from pengserve.replicas.engine.tiers.tier_memory import LEAST_WRITTEN
from pengserve.replicas.kv.copies import CopiesBetween
from pengserve.replicas.kv.host_tier import HostCells, HostTier, LentRows
from pengserve.replicas.kv.pool import DevicePool
from pengserve.replicas.kv.standing import NONE, hold, let_go, stand_still, vacate
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.kv.tiered_rows import BlockPlace
from pengserve.replicas.memory.layers import LayerMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSizes:
    """Blocks of a pipeline, of whose members each has the same memory for weights and KV. vLLM's null block counts."""

    stages: tuple[LayerRange, ...]
    device_blocks: tuple[int, ...]  # of each stage
    per_row: int  # blocks of a stage on a row of the host; 0: there is no host tier
    longest_blocks: int  # of a request
    reserved_blocks: int  # of the smallest device: the room for a step of the longest request when the host is full

    @property
    def smallest(self) -> int:
        """Blocks that each device has."""
        return min(self.device_blocks)

    def num_usable(self, num_columns: int, host_rows: int) -> int:
        """Blocks that a scheduler may hand out, without the null block.

        Args:
            num_columns: that each device has.
            host_rows: of the host tier that each member has for the pipeline.
        """
        return num_columns - 1 + max(0, host_rows * self.per_row - self.reserved_blocks)


def pipeline_sizes(
    sizes: LayerSizes, stages: Sequence[LayerRange], *, max_blocks: int, has_host: bool
) -> PipelineSizes:
    """What fits. `max_blocks`: of the longest request that the user wants."""
    devices = tuple(map(sizes.num_blocks, stages))
    if not has_host:
        return PipelineSizes(
            stages=tuple(stages), device_blocks=devices, per_row=0, longest_blocks=min(devices) - 1, reserved_blocks=0
        )
    counts = [stop - first for first, stop in stages]
    most = min(count * (blocks - 1 - LEAST_WRITTEN) for count, blocks in zip(counts, devices, strict=True))
    longest = max(1, min(most, max_blocks))
    return PipelineSizes(
        stages=tuple(stages),
        device_blocks=devices,
        per_row=sizes.num_layers // max(counts),
        longest_blocks=longest,
        reserved_blocks=min(1 + -(-longest // min(counts)), min(devices) - 1),
    )


class StageTiers:
    """One member's, of one stage. Belongs to the step thread."""

    def __init__(self, base: TieredKv, memory: LayerMemory, sizes: PipelineSizes, stage: int, block_size: int) -> None:
        """`base`: the tiers of `dp`, whose host and engine serve the stage too.

        Raises:
            UnsupportedShapeError: the memory of layers cannot be seen side by side.
        """
        self.sizes, self.stage = sizes, stage
        first, stop = sizes.stages[stage]
        assert isinstance(base.host, HostTier)
        self._first, self._host = first, base.host
        self._seen = memory.seen_side_by_side((first, stop), sizes.device_blocks[stage])
        self._seen.show()
        block_bytes = memory.sizes.block_bytes
        pool = DevicePool(self._seen.memory, stop - first, sizes.device_blocks[stage], block_bytes)
        self.rows = LentRows(base.host, stop - first, sizes.per_row)
        self.kv = TieredKv(
            pool,
            self.rows,
            num_blocks=sizes.device_blocks[stage] + base.host.num_rows * sizes.per_row,
            block_size=block_size,
            engine=CopiesBetween(base.engine, pool, self.rows),
            counts=base.counts,
        )
        self._coming = NONE
        self._before: LentRows | None = None
        self.clear()

    @property
    def host(self) -> "ByModelLayer":
        """Its rows, by layers of the model."""
        return ByModelLayer(self.rows, self._first)

    @property
    def num_host_rows(self) -> int:
        """Of the host tier of `dp`."""
        return self._host.num_rows

    def clear(self) -> None:
        """The pipeline does not run: no block holds anything, and the host's rows are `dp`'s."""
        self._end_before()
        self.kv.clear()
        self.kv.placement.resize(0)
        self.rows.give_all()
        self._coming = NONE

    def take_over(self, other: "StageTiers") -> HostCells:
        """What a narrower pipeline that ends has on the host is to be read until `all_came`."""
        other.rows.give_back()
        host = other.host
        self._before = host.rows = other.rows.hand_over()
        return host

    def hold(self, blocks: np.ndarray, columns: np.ndarray) -> list[BlockPlace]:
        """As `standing.hold`, until `all_came`."""
        self.rows.borrow()
        self._coming = np.concatenate([self._coming, blocks])
        return hold(self.kv, blocks, columns)

    def all_came(self) -> None:
        """All KV that was to come is there, and `dp` keeps nothing on the host."""
        self._end_before()
        self.rows.borrow()
        let_go(self.kv, self._coming)
        self._coming = NONE

    def _end_before(self) -> None:
        if self._before is not None:
            self._before.give_all()
            self._before = None

    def grow(self, num_columns: int) -> None:
        """The layers have memory for so many blocks each now."""
        self._seen.show()
        self.kv.placement.resize(min(num_columns, self.kv.pool.num_blocks))

    def gather(self, blocks: np.ndarray) -> None:
        """These blocks come to be in one place in all layers each. What others hold is forgotten.

        Raises:
            EngineError: a copy failed.
        """
        stand_still(self.kv, blocks)
        self.rows.give_back()

    def shrink(self, num_columns: int, withheld: np.ndarray) -> None:
        """The layers are about to keep memory for so many blocks each. What is `withheld` holds nothing any more.

        Raises:
            EngineError: there is too little room for what is there.
        """
        self.kv.traffic.cancel(self.kv.traffic.copies())
        self.kv.forget(withheld)
        vacate(self.kv, min(num_columns, self.kv.placement.num_columns))

    def check(self) -> tuple[str, ...]:
        """Laws that are broken, in sentences."""
        return self.kv.check()


class ByModelLayer(HostCells):
    """A stage's rows on the host, by layers of the model."""

    def __init__(self, rows: LentRows, first: int) -> None:
        self.cells, self.rows, self._first = rows.cells, rows, first

    def at(self, layer: int, rows: np.ndarray) -> np.ndarray:
        """As `HostCells`."""
        return self.rows.at(layer - self._first, rows)
