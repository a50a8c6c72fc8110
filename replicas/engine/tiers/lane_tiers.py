"""One lane's way to the tiers of its instance: by the lane's own blocks. In a group, what its leader says of them is
heard by all members, and each moves its own share of the KV.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from pengserve.planners.layer_sizes import LayerRange
from pengserve.replicas.engine.scheduling.block_groups import blocks_of
from pengserve.replicas.engine.vllm_seam import SchedulerOutput
from pengserve.replicas.kv.placement import NO_ROW, Use, Uses
from pengserve.replicas.kv.table import CellTable
from pengserve.replicas.kv.tiered import TieredKv

TELL_USES_EVERY = 8  # steps that choose who is stepped: so often followers hear which blocks are of no use any more

Physical = Callable[[Sequence[int]], Sequence[int]]


class Hint(msgspec.Struct, array_like=True):
    """What the leader says of some of the lane's blocks. A member that does not follow it is slower, not wrong."""

    blocks: list[int]
    is_leaving: bool  # full blocks that may leave the device; else they come back to it
    layers: list[int] | None = None  # those that are to be on the host in these layers of the model alone, where given


class LaneTiers:
    """Belongs to the step thread."""

    def __init__(
        self,
        tiers: TieredKv,
        block_size: int = 0,
        physical: Physical | None = None,
        *,
        num_members: int = 1,
        stages: Sequence[LayerRange] = (),
        stage: int = 0,
    ) -> None:
        """
        Args:
            block_size: tokens of the lane's blocks; 0: as many as in `dp`.
            physical: the instance's blocks behind the lane's, where these are not the same.
            num_members: each of which has as much of the lane's KV.
            stages: of a pipeline, the layers of each, and this member's `stage`. Else every member has all layers.
        """
        self.tiers, self.block_size = tiers, block_size or tiers.block_size
        self.num_layers, self.device_blocks = tiers.pool.num_layers, tiers.pool.num_blocks
        self._physical, self._num_members = physical, num_members
        self._stages = stages or [(0, self.num_layers)]
        self._first, self.num_model_layers = self._stages[stage][0], self._stages[-1][1]
        self._hints: list[Hint] | None = None  # None: no other member hears them
        self._num_choices = 0  # leader: steps that chose since the followers have heard of uses

    def physical(self, blocks: Sequence[int] | np.ndarray) -> np.ndarray:
        """The instance's blocks behind these of the lane."""
        found = blocks if self._physical is None else self._physical(list(blocks))
        return np.asarray(found, dtype=np.int64)

    def own(self, layers: Iterable[int]) -> list[int]:
        """Of these layers of the model, those that this member has, counted from its first."""
        return [layer - self._first for layer in layers if 0 <= layer - self._first < self.num_layers]

    def everywhere(self, layers: Sequence[int]) -> list[int]:
        """The model's layers that stand where these do, counted from its first, at each member."""
        return [first + layer for first, stop in self._stages for layer in layers if first + layer < stop]

    # Where KV is to be ------------------------------------------------------------------------------------------------

    def write_behind(self, blocks: Sequence[int]) -> None:
        """As `TieredKv.write_behind`."""
        self._tell(Hint(list(blocks), is_leaving=True))
        self.tiers.write_behind(self.physical(blocks))

    def place(self, blocks: Sequence[int], layers: Sequence[int]) -> None:
        """As `TieredKv.place`, of layers of the model."""
        self._tell(Hint(list(blocks), is_leaving=True, layers=list(layers)))
        self.tiers.place(self.physical(blocks), self.own(layers))

    def bring(self, blocks: Sequence[int], keep: Sequence[int]) -> bool:
        """As `TieredKv.bring`."""
        is_coming = self.tiers.bring(self.physical(blocks), self.physical(keep))
        if is_coming:
            self._tell(Hint(list(blocks), is_leaving=False))
        return is_coming

    def is_moving(self, blocks: Sequence[int]) -> bool:
        """As `TieredKv.is_moving`."""
        return self.tiers.is_moving(self.physical(blocks))

    def num_copied(self, blocks: Sequence[int]) -> np.ndarray:
        """As `TieredKv.num_copied`."""
        return self.tiers.num_copied(self.physical(blocks))

    def take_copied_bytes(self, blocks: Sequence[int], before: np.ndarray) -> int:
        """As `TieredKv.take_copied`, in bytes of all members."""
        return self.tiers.take_copied(self.physical(blocks), before) * self.cell_bytes * self._num_members

    def figures(self) -> dict[str, int | float]:
        """As `TieredKv.figures`."""
        return self.tiers.figures()

    def count_park(self) -> None:
        """A request has left the batch with its KV."""
        self.tiers.counts.parks += 1

    def count_displaced(self, count: int) -> None:
        """So many requests gave their place in the batch to more urgent ones."""
        self.tiers.counts.displaced += count

    # What placements are planned with ---------------------------------------------------------------------------------

    @property
    def cells_per_s(self) -> float:
        """Cells that come from the host in a second: as copies of late went, or as `CopyEngine.speed` assumes."""
        return self.tiers.engine.speed(to_host=False) / self.tiers.pool.block_bytes

    @property
    def cell_bytes(self) -> int:
        """Of a block in one layer."""
        return self.tiers.pool.block_bytes

    @property
    def num_stuck(self) -> int:
        """Blocks on the device that the host has no row for, now; negative where it has more rows than it needs."""
        placement = self.tiers.placement
        num_without = int(np.count_nonzero((placement.index[0] != 0) & (placement.row == NO_ROW)))
        return num_without - placement.num_free_rows

    @property
    def num_staged_steps(self) -> int:
        """Steps in which a layer was staged, in all."""
        return self.tiers.counts.staged_steps

    @property
    def stall_s(self) -> float:
        """Seconds that layers have waited for their copies, in all."""
        return self.tiers.counts.stall_s

    def is_saved(self, blocks: Sequence[int]) -> bool:
        """Whether the host has all of these full blocks."""
        return bool(self.tiers.placement.on_host[:, self.physical(blocks)].all())

    # What blocks are used for ----------------------------------------------------------------------------------------

    def watch(self, uses: Uses, told: "ToldUses | None") -> None:
        """The lane begins to run: `uses`, the leader's, or what a follower is told, say what may leave the device."""
        if told is None:
            self._num_choices = 0
            self.tiers.watch_uses(uses)
        else:
            told.begin()
            self.tiers.watch_uses(told, told.hold)

    def uses_to_tell(self, lane_uses: Uses, *, has_chosen: bool) -> bytes:
        """Leader: after a step that had to choose, now and then: what the lane's blocks are used for."""
        if not has_chosen:
            return b""
        self._num_choices += 1
        return lane_uses().tobytes() if self._num_choices % TELL_USES_EVERY == 1 else b""

    # Between members --------------------------------------------------------------------------------------------------

    def tell_others(self) -> None:
        """Leader of a group: hints are kept for the other members, from now on."""
        self._hints = []

    def take_hints(self) -> list[Hint]:
        """Leader: hints that the others have not heard yet."""
        if not self._hints:
            return []
        hints, self._hints = self._hints, []
        return hints

    def hear(self, hints: Sequence[Hint]) -> None:
        """Follower: does as the leader does, as far as there is room here."""
        for hint in hints:
            blocks = self.physical(hint.blocks)
            if hint.layers is not None:
                self.tiers.place(blocks, self.own(hint.layers))
            elif hint.is_leaving:
                self.tiers.write_behind(blocks)
            else:
                self.tiers.bring_held(blocks)

    def _tell(self, hint: Hint) -> None:
        if self._hints is not None and hint.blocks:
            self._hints.append(hint)


class ToldUses:
    """What a follower knows of the blocks that a group's lane has leased: what it was told, and what was taken since.

    A block that a step begins, or that is written from outside of one, is held until the leader says otherwise.
    """

    def __init__(self, own: Uses, table: CellTable, num_blocks: int) -> None:
        """
        Args:
            own: what the scheduler of `dp` says.
            table: of the lane.
            num_blocks: of the instance, the null block included.
        """
        self._own, self._table = own, table
        self._uses = np.full(num_blocks, Use.HELD, dtype=np.uint8)

    def __call__(self) -> np.ndarray:
        """As `Uses`."""
        found, backing = self._own().copy(), self._table.backing()
        leased = backing[backing != 0]
        found[leased] = self._uses[leased]
        return found

    def begin(self) -> None:
        """The lane begins to run: the leader has told nothing yet."""
        self._uses[:] = Use.HELD

    def hear(self, lane_uses: bytes) -> None:
        """What the leader's scheduler says of the lane's blocks, a byte each."""
        if lane_uses:
            backing = self._table.backing()
            logical = np.flatnonzero(backing[: len(lane_uses)])
            self._uses[backing[logical]] = np.frombuffer(lane_uses, dtype=np.uint8)[logical]

    def hold(self, blocks: Sequence[int] | np.ndarray) -> None:
        """Blocks of the instance are in use from now on."""
        self._uses[np.asarray(blocks, dtype=np.int64)] = Use.HELD


def uses_of(own: np.ndarray, leased: np.ndarray, lane_uses: np.ndarray) -> np.ndarray:
    """What the instance's blocks are used for while a group's lane that is led here has leased some.

    Args:
        own: by the `dp` lane's scheduler.
        leased: by the lane's block, the instance's block behind it, or 0; perhaps of more than its scheduler has.
        lane_uses: by the lane's scheduler.
    """
    found, logical = own.copy(), np.flatnonzero(leased[: len(lane_uses)])
    found[leased[logical]] = lane_uses[logical]
    return found


def blocks_begun(output: SchedulerOutput) -> list[int]:
    """Blocks that requests have from this step on."""
    found = [block for new in output.scheduled_new_reqs for block in blocks_of(new.block_ids)]
    return found + [block for ids in output.scheduled_cached_reqs.new_block_ids if ids for block in blocks_of(ids)]
