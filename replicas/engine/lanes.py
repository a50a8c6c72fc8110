"""All lanes of one instance, and which of them runs (docs/architecture.md: changing the shape).

    DP         the instance's own engine
    LEADING    a tp lane whose scheduler is here; the others' `dp` requests wait, where a switch left some
    FOLLOWING  a tp lane that another instance schedules: steps come as messages, there is no work of one's own

Blocks belong to the `dp` lane and are leased to others; the ledger knows of every one.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import PengServeError, StepError, UnsupportedShapeError
from pengserve.planners.types.layout import Group
from pengserve.planners.types.snapshot import InstanceStats, LaneInfo
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.dp_lane import DpLane
from pengserve.replicas.engine.lane import Lane
from pengserve.replicas.engine.lane_groups import ActiveGroup, Collectives
from pengserve.replicas.engine.tp_lane import TpLane, kv_view
from pengserve.replicas.engine.vllm_seam import EngineCoreOutputs, EngineCoreRequest, Request
from pengserve.replicas.memory.kv_views import KvView
from pengserve.replicas.memory.ledger import BlockLedger
from pengserve.replicas.memory.weight_views import Shard

logger = logging.getLogger(__name__)


class Lanes:
    """Owned by the step thread, but for `prepare`. A `SteppedLane` of the step loop."""

    def __init__(self, config: InstanceConfig) -> None:
        """Builds the `dp` lane.

        Raises:
            ConfigError: an engine argument is not usable.
        """
        self.dp = DpLane(config)
        if config.degrees and self.dp.core.vllm_config.model_config.enforce_eager:
            # vLLM compiles the masking of a sharded embedding, also where eager execution is asked for: that would be
            # seconds within the first steps of a group.
            torch.compiler.set_stance("force_eager")
        self.capacity = self.dp.capacity
        self.ledger = BlockLedger(self.capacity.num_blocks + 1, "dp")
        self.on_broken: Callable[[BaseException], None] = lambda error: None  # the running tp lane cannot go on
        self._active = ActiveGroup()
        self._tp: dict[Group, TpLane] = {}
        self._why_not: dict[int, str] = {}
        self._running: TpLane | None = None  # None: dp
        self._is_leading = False
        self._switches = 0
        self._idle_totals: dict[str, int] = {}
        self._dp_view: KvView | None = None

    # Lanes -----------------------------------------------------------------------------------------------------------

    def build(self, group: Group, rank: int) -> None:
        """Makes sure that there is a lane for `group`; a model that cannot be run in its shape is noted, not raised."""
        degree = len(group.members)
        if group in self._tp or degree in self._why_not:
            return
        try:
            self._tp[group] = TpLane(self.dp, self._active, str(group), Shard(rank, degree), self.lease)
        except UnsupportedShapeError as error:
            logger.warning("no lane for %s: %s", group, error)
            self._why_not[degree] = str(error)

    def infos(self) -> tuple[LaneInfo, ...]:
        """The shapes that can run here, and those that cannot, with the reason."""
        shapes = {lane.shape: LaneInfo(shape=lane.shape, capacity=lane.capacity) for lane in self._tp.values()}
        for degree, why_not in self._why_not.items():
            shapes[f"tp{degree}"] = LaneInfo(shape=f"tp{degree}", capacity=None, why_not=why_not)
        return (LaneInfo(shape="dp", capacity=self.dp.capacity), *(shapes[shape] for shape in sorted(shapes)))

    def tp(self, group: Group) -> TpLane:
        """The lane of `group`.

        Raises:
            StepError: there is none here.
        """
        if group not in self._tp:
            raise StepError(self._why_not.get(len(group.members), f"this instance has no lane for {group} yet"))
        return self._tp[group]

    def dp_view(self) -> KvView:
        """KV of the `dp` lane, by physical block."""
        if self._dp_view is None:
            self._dp_view = kv_view(self.dp.worker.model_runner)
        return self._dp_view

    @property
    def running(self) -> TpLane | None:
        """The tp lane that runs now; None in dp."""
        return self._running

    @property
    def current(self) -> Lane:
        """The lane that takes requests here."""
        return self._running if self._running is not None and self._is_leading else self.dp

    @property
    def is_following(self) -> bool:
        """Whether another instance schedules what runs here."""
        return self._running is not None and not self._is_leading

    def enter(self, lane: TpLane, seed: int, collectives: Collectives) -> None:
        """From the next step on, `lane` runs. Requests that are still in `dp` wait there."""
        lane.group.collectives = collectives
        self._is_leading = lane.shard.rank == 0
        self._running = lane
        self._switches += 1
        self._count_idle()
        lane.enter(seed)

    def leave(self) -> None:
        """From the next step on, `dp` runs. The lane that ran has given up its requests and its blocks."""
        lane, self._running = self._running, None
        assert lane is not None
        lane.leave()
        lane.group.collectives = None
        self._switches += 1
        self._count_idle()

    def abandon(self) -> list[str]:
        """Back to `dp` at once, whatever state the tp lane is in; ids of the requests that are lost with it."""
        lane = self._running
        assert lane is not None
        lost = [request.request_id for request in lane.requests()] if self._is_leading else []
        self.leave()
        self.discard(lane)
        return lost

    def discard(self, lane: TpLane) -> None:
        """Takes all blocks from a lane that does not run, and builds it anew: its scheduler may be in the middle."""
        self.dp.take_back(self.withdraw(lane, lane.table.leased()))
        group = next(group for group, other in self._tp.items() if other is lane)
        self._tp[group] = TpLane(self.dp, self._active, lane.group.unique_name, lane.shard, self.lease)
        self._tp[group].count_on_from(lane)

    # Blocks ----------------------------------------------------------------------------------------------------------

    def lease(self, lane: TpLane, logical_ids: Sequence[int]) -> None:
        """Backs logical blocks of `lane` with free ones of `dp`."""
        if logical_ids:
            physical_ids = self.dp.lend(len(logical_ids))
            lane.back(logical_ids, physical_ids)
            self.ledger.move(physical_ids, "dp", lane.group.unique_name)

    def withdraw(self, lane: TpLane, logical_ids: Sequence[int]) -> list[int]:
        """Ends the backing of logical blocks; the physical ids, which are nobody's until `dp` takes them back."""
        physical_ids = lane.table.release(logical_ids)
        self.ledger.move(physical_ids, lane.group.unique_name, "dp")
        return physical_ids

    def reclaim(self, lane: TpLane, logical_ids: Sequence[int]) -> None:
        """Gives the blocks behind `logical_ids` back to `dp`."""
        self.dp.take_back(self.withdraw(lane, logical_ids))

    def check(self) -> tuple[str, ...]:
        """Conservation laws, as sentences where one is broken: every block has one owner, lent and leased agree."""
        wrong = list(self.ledger.check())
        leased = {lane.group.unique_name: len(lane.table.leased()) for lane in self._tp.values()}
        for name, count in leased.items():
            if self.ledger.num_leased(name) != count:
                wrong.append(f"{name} has {count} blocks, but the ledger gave it {self.ledger.num_leased(name)}")
        if self.dp.capacity.num_blocks - self.dp.num_held != sum(leased.values()):
            wrong.append(f"dp lent {self.dp.capacity.num_blocks - self.dp.num_held} blocks, lanes have {leased}")
        wrong += [
            f"{name} keeps blocks while it does not run" for name, n in leased.items() if n and not self._is(name)
        ]
        return tuple(wrong)

    def _is(self, name: str) -> bool:
        return self._running is not None and self._running.group.unique_name == name

    # Requests --------------------------------------------------------------------------------------------------------

    def prepare(
        self, request: EngineCoreRequest, output_token_ids: Sequence[int], then: Callable[[Request], None]
    ) -> None:
        """See `DpLane.prepare`: the same for all lanes. From one other thread."""
        self.dp.prepare(request, output_token_ids, then)

    def add(self, request: Request) -> None:
        """Gives a prepared request to the lane that takes requests here."""
        self.current.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forgets requests, whichever lane they are in."""
        ids = list(request_ids)
        self.dp.abort(ids)
        if self._running is not None and self._is_leading:
            self._running.abort(ids)

    def num_requests(self) -> int:
        """Running and waiting requests of all lanes."""
        return self.dp.num_requests() + (self.current.num_requests() if self.current is not self.dp else 0)

    # Steps -----------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return not self.is_following and self.current.has_work()

    def step(self) -> Mapping[int, EngineCoreOutputs]:
        """One step of the lane that runs. A tp lane that breaks costs its requests their KV, never the instance."""
        if self._running is None:
            return self.dp.step()
        try:
            return self._running.step()
        except Exception as error:
            self._break(error)
            return {}

    def follow(self, parts: Sequence[Buffer]) -> None:
        """Executes a step of the leader's."""
        assert self._running is not None
        try:
            self._running.follow(parts)
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """Whatever goes wrong in a tp lane, the `dp` lane is whole: the instance must not die of it."""
        if not isinstance(error, PengServeError):
            logger.exception("a step of %s failed", self._running.group.unique_name if self._running else "dp")
        self.on_broken(error)

    def stats(self, last_step_s: float = 0.0) -> InstanceStats:
        """Load of the lane that runs; totals of all lanes."""
        if self._running is None:
            return self.dp.stats(last_step_s, self._idle_totals, total_switches=self._switches)
        return self.current.stats(
            last_step_s,
            self._idle_totals,
            shape=self._running.shape,
            is_follower=self.is_following,
            num_paused=self.dp.num_requests(),
            total_switches=self._switches,
        )

    def _count_idle(self) -> None:
        """Totals of the lanes that do not run change only when another begins to: they are added up then."""
        idle = [lane for lane in (self.dp, *self._tp.values()) if lane is not self.current]
        self._idle_totals = dict(sum((Counter(lane.totals()) for lane in idle), Counter()))

    def close(self) -> None:
        """Frees everything."""
        if self._running is not None:
            self._running.leave()
        self.dp.close()
