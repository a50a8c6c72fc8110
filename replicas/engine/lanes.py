"""All lanes of one instance, and which of them runs (docs/architecture.md: changing the shape).

    DP         the instance's own engine
    LEADING    a group's lane whose scheduler is here; `dp` requests wait, where a switch left some
    FOLLOWING  a group's lane that another instance schedules: steps come as messages, there is no work of one's own

Blocks belong to the `dp` lane and are leased to others; the ledger knows of every one. A pipeline lane has them all,
and those beyond them that dropped parameters made room for.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from pengserve.planners.stages import microbatches_in_flight
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import (
    EngineError,
    PengServeError,
    StepError,
    UnsupportedShapeError,
    one_line,
)
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import InstanceStats, LaneInfo
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.dp_lane import DpLane
from pengserve.replicas.engine.group_lane import GroupLane
from pengserve.replicas.engine.idle_profile import IdleProfile
from pengserve.replicas.engine.lane import Lane
from pengserve.replicas.engine.lane_groups import ActiveGroup, Collectives
from pengserve.replicas.engine.microbatches import FIRST_MODEL
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.stage_clock import StageClock
from pengserve.replicas.engine.tp_lane import TpLane, kv_view
from pengserve.replicas.engine.vllm_seam import EngineCoreOutputs, EngineCoreRequest, Request
from pengserve.replicas.memory.kv_views import KvView
from pengserve.replicas.memory.ledger import BlockLedger
from pengserve.replicas.memory.weight_views import Shard
from pengserve.replicas.processors import num_cores, processors_each

logger = logging.getLogger(__name__)

NO_OUTPUTS: Mapping[int, EngineCoreOutputs] = MappingProxyType({})
FIRST_STEP_S = 0.005


class Lanes:
    """Owned by the step thread, but for `prepare`. A `SteppedLane` of the step loop."""

    def __init__(self, config: InstanceConfig) -> None:
        """Builds the `dp` lane.

        Raises:
            ConfigError: an engine argument is not usable.
        """
        self._config, self._cores = config, num_cores()
        self._processors = 1.0  # of each instance here
        self.dp = DpLane(config)
        self.capacity = self.dp.capacity
        self.ledger = BlockLedger(self.capacity.num_blocks + 1, "dp")
        self.on_broken: Callable[[BaseException], None] = lambda error: None  # the group that runs cannot go on
        self.chore: Callable[[float], bool] | None = None  # a piece of work beside each step; True: it has ended
        self._active = ActiveGroup()
        self._lanes: dict[Group, GroupLane] = {}
        self._why_not: dict[str, str] = {}  # by shape
        self._running: GroupLane | None = None  # None: dp
        self._is_leading = False
        self._step_s = FIRST_STEP_S  # of the newest step of a group
        self._idle_totals: dict[str, int] = {}
        self._gone: Counter[str] = Counter()  # totals of lanes that are gone and could not be built anew
        self._dp_view: KvView | None = None
        self._clock = StageClock()  # of all pipelines, one after the other
        self._cost_model = FIRST_MODEL
        self._profile = IdleProfile(self.dp) if config.max_stages > 1 else None

    def use_idle_time(self, is_wanted: Callable[[], bool]) -> None:
        """Does what can wait until an instance has nothing else to do; returns soon after `is_wanted()`."""
        if self._profile is None or self._running is not None or self.dp.has_work():
            return
        self._profile.advance(is_wanted)
        if self._profile.is_over:
            self._cost_model = self._profile.model() or FIRST_MODEL
            self._profile = None
            for lane in self._lanes.values():
                if isinstance(lane, PpLane):
                    lane.assume(self._cost_model)

    # Lanes -----------------------------------------------------------------------------------------------------------

    def build(self, group: Group, rank: int) -> None:
        """Makes sure that there is a lane for `group`, or that `infos` say why there is none: `dp` needs no other."""
        if group not in self._lanes and group.shape not in self._why_not:
            self._try_to_make(group, rank)

    def _try_to_make(self, group: Group, rank: int) -> None:
        """Nothing that goes wrong is raised. An unforeseen fault leaves its traceback in the log, once."""
        try:
            self._lanes[group] = self._make(group, rank)
        except Exception as error:
            is_foreseen = isinstance(error, UnsupportedShapeError)
            why = str(error) if is_foreseen else f"its lane cannot be built ({one_line(error)})"
            logger.warning("no lane for %s: %s", group, why, exc_info=not is_foreseen)
            self._why_not[group.shape] = why

    def refuse(self, shape: str, why: str) -> None:
        """No group of this shape can run here from now on; `infos` say why. One that runs is left alone."""
        if self._running is None or self._running.shape != shape:
            self._why_not.setdefault(shape, why)

    def refuse_all(self, why: str) -> None:
        """Only `dp` can run here."""
        config = self._config
        stages = (1 << power for power in range(1, config.max_stages.bit_length()))
        for shape in (*(f"tp{degree}" for degree in config.degrees), *(f"pp{count}" for count in stages)):
            self.refuse(shape, why)

    def _make(self, group: Group, rank: int) -> GroupLane:
        if self.dp.pristine_config is None:
            raise UnsupportedShapeError("vLLM's configuration could not be copied for it; the instance's log says why")
        if group.kind is GroupKind.TP:
            return TpLane(self.dp, self._active, str(group), Shard(rank, group.degree), self.lease)
        if self.dp.memory is None:
            raise UnsupportedShapeError(self.dp.memory_failure or "parameters can be dropped where memory_bytes is set")
        lane = PpLane(
            self.dp,
            self._active,
            str(group),
            rank,
            group.degree,
            self.dp.memory.layers,
            cost_model=self._cost_model,
            policy=self._config.microbatches,
            clock=self._clock,
        )
        lane.max_in_flight = self._max_in_flight(lane)
        return lane

    def share_machine(self, num_instances: int) -> None:
        """So many instances run on this machine from now on, this one among them."""
        self._processors = processors_each(self._config, self._cores, num_instances)
        for lane in self._lanes.values():
            if isinstance(lane, PpLane):
                lane.max_in_flight = self._max_in_flight(lane)

    def _max_in_flight(self, lane: PpLane) -> int:
        fixed = self._config.max_in_flight
        return min(fixed, lane.num_stages) if fixed else microbatches_in_flight(lane.num_stages, self._processors)

    def infos(self) -> tuple[LaneInfo, ...]:
        """The shapes that can run here, and those that cannot, with the reason."""
        shapes = {lane.shape: LaneInfo(shape=lane.shape, capacity=lane.capacity) for lane in self._lanes.values()}
        for shape, why_not in self._why_not.items():
            shapes[shape] = LaneInfo(shape=shape, capacity=None, why_not=why_not)
        return (LaneInfo(shape="dp", capacity=self.dp.capacity), *(shapes[shape] for shape in sorted(shapes)))

    def tp(self, group: Group) -> TpLane:
        """The tensor-parallel lane of `group`.

        Raises:
            StepError: there is none here.
        """
        lane = self.require(group)
        assert isinstance(lane, TpLane)
        return lane

    def pp(self, group: Group) -> PpLane:
        """The pipeline lane of `group`.

        Raises:
            StepError: there is none here.
        """
        lane = self.require(group)
        assert isinstance(lane, PpLane)
        return lane

    def find(self, group: Group | None) -> GroupLane | None:
        """The lane of `group`, where there is one. From any thread."""
        return self._lanes.get(group) if group is not None else None

    def require(self, group: Group) -> GroupLane:
        """The lane of `group`.

        Raises:
            StepError: there is none here, and why.
        """
        if group not in self._lanes:
            raise StepError(self._why_not.get(group.shape, f"this instance has no lane for {group} yet"))
        return self._lanes[group]

    def dp_view(self) -> KvView:
        """KV of the `dp` lane, by physical block."""
        if self._dp_view is None:
            self._dp_view = kv_view(self.dp.worker.model_runner)
        return self._dp_view

    @property
    def running(self) -> GroupLane | None:
        """The group's lane that runs now; None in dp."""
        return self._running

    @property
    def current(self) -> Lane:
        """The lane that takes requests here."""
        return self._running if self._running is not None and self._is_leading else self.dp

    @property
    def is_following(self) -> bool:
        """Whether another instance schedules what runs here."""
        return self._running is not None and not self._is_leading

    def enter(self, lane: GroupLane, seed: int, collectives: Collectives) -> None:
        """From the next step on, `lane` runs. Requests that are still in `dp` wait there."""
        self._is_leading = lane.rank == 0
        self._running = lane
        self._count_idle()
        lane.enter(seed, collectives)

    def leave(self) -> None:
        """From the next step on, `dp` runs. The lane that ran has given up its requests and its blocks."""
        lane, self._running = self._running, None
        assert lane is not None
        self.chore = None
        lane.leave()
        self._count_idle()

    def abandon(self) -> list[str]:
        """Goes back to `dp` at once, in any state of the group's lane; ids of the requests that are lost with it."""
        lane = self._running
        assert lane is not None
        lost = [request.request_id for request in lane.requests()] if self._is_leading else []
        self.leave()
        self.discard(lane)
        return lost

    def discard(self, lane: GroupLane) -> None:
        """Takes all blocks from a lane that does not run, and builds it anew: its scheduler may hold requests.

        Of a pipeline lane, also brings all memory back to where `dp` needs it, from this member's own copy.
        """
        if isinstance(lane, TpLane):
            self.dp.take_back(self.withdraw(lane, lane.table.leased()))
        else:
            self.return_all(lane)
            self._make_whole()
        group = next(group for group, other in self._lanes.items() if other is lane)
        del self._lanes[group]
        self._try_to_make(group, lane.rank)
        if group in self._lanes:
            self._lanes[group].count_on_from(lane)
        else:
            self._gone.update(lane.totals())

    def _make_whole(self) -> None:
        """Gives all memory back to `dp`. Where that changes anything, `dp` forgets its cached prefixes.

        Raises:
            EngineError: a request held blocks of `dp` meanwhile.
        """
        memory = self.dp.memory
        assert memory is not None
        if not memory.layers.is_whole():
            memory.make_whole()
            if not self.dp.reset_prefix_cache():
                raise EngineError("requests held blocks of dp while another lane had its memory")

    # Blocks ----------------------------------------------------------------------------------------------------------

    def lease(self, lane: TpLane, logical_ids: Sequence[int]) -> None:
        """Backs logical blocks of `lane` with free ones of `dp`."""
        if logical_ids:
            physical_ids = self.dp.lend(len(logical_ids))
            lane.back(logical_ids, physical_ids)
            self.ledger.move(physical_ids, "dp", lane.name)

    def lend_all(self, lane: GroupLane) -> None:
        """All blocks of `dp` are the lane's; no request may hold any."""
        physical_ids = self.dp.lend(self.dp.capacity.num_blocks)
        self.ledger.move(physical_ids, "dp", lane.name)

    def return_all(self, lane: GroupLane) -> None:
        """Ends `lend_all`, where it was called."""
        physical_ids = self.ledger.leased(lane.name)
        self.ledger.move(physical_ids, lane.name, "dp")
        self.dp.take_back(physical_ids)

    def withdraw(self, lane: TpLane, logical_ids: Sequence[int]) -> list[int]:
        """Ends the backing of logical blocks; the physical ids, which no lane uses until `dp` takes them back."""
        physical_ids = lane.table.release(logical_ids)
        self.ledger.move(physical_ids, lane.name, "dp")
        return physical_ids

    def reclaim(self, lane: TpLane, logical_ids: Sequence[int]) -> None:
        """Gives the blocks behind `logical_ids` back to `dp`."""
        self.dp.take_back(self.withdraw(lane, logical_ids))

    def check(self) -> tuple[str, ...]:
        """Conservation laws, as sentences where one is broken: every block has one owner, lent and leased agree."""
        wrong = list(self.ledger.check())
        wrong += self._check_memory()
        leased = {lane.name: self.ledger.num_leased(lane.name) for lane in self._lanes.values()}
        for lane in self._lanes.values():
            if isinstance(lane, TpLane) and leased[lane.name] != len(lane.table.leased()):
                wrong.append(f"{lane.name} has {len(lane.table.leased())} blocks, the ledger says {leased[lane.name]}")
        if self.dp.capacity.num_blocks - self.dp.num_held != sum(leased.values()):
            wrong.append(f"dp lent {self.dp.capacity.num_blocks - self.dp.num_held} blocks, lanes have {leased}")
        wrong += [
            f"{name} keeps blocks while it does not run" for name, n in leased.items() if n and not self._is(name)
        ]
        return tuple(wrong)

    def _check_memory(self) -> tuple[str, ...]:
        if self.dp.memory is None:
            return ()
        layers = self.dp.memory.layers
        if isinstance(self._running, PpLane):
            if not self._running.is_settled:
                return layers.check_chunks()
            kept = self._running.layers
            return layers.check(kept, layers.sizes.num_blocks(kept))
        return layers.check(layers.sizes.all_layers, layers.base_blocks)

    def _is(self, name: str) -> bool:
        return self._running is not None and self._running.name == name

    # Requests --------------------------------------------------------------------------------------------------------

    def prepare(
        self, request: EngineCoreRequest, output_token_ids: Sequence[int], then: Callable[[Request], None]
    ) -> None:
        """Prepares a request, for all lanes alike, and calls `then` when `add` may be called. From one other thread."""
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
        return self.chore is not None or self._can_step()

    def _can_step(self) -> bool:
        return not self.is_following and self.current.has_work()

    def step(self) -> Mapping[int, EngineCoreOutputs]:
        """One step of the lane that runs. A group that breaks costs its requests their KV, never the instance."""
        if self._running is None:
            return self.dp.step()
        try:
            outputs = NO_OUTPUTS
            if self._can_step():
                started_s = time.perf_counter()
                outputs = self._running.step()
                self._step_s = time.perf_counter() - started_s
            self._do_chore()
        except Exception as error:
            self._break(error)
            return NO_OUTPUTS
        return outputs

    def _do_chore(self) -> None:
        """A piece of what goes on beside the steps of a group, of about a step's length."""
        if self.chore is not None and self.chore(self._step_s):
            self.chore = None

    def follow(self, parts: Sequence[Buffer]) -> None:
        """Executes a step of the leader's."""
        assert self._running is not None
        started_s = time.perf_counter()
        try:
            self._running.follow(parts)
            self._step_s = time.perf_counter() - started_s
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """An error in a group's lane leaves the `dp` lane whole, so the instance does not die of it."""
        if not isinstance(error, PengServeError):
            logger.exception("a step of %s failed", self._running.name if self._running else "dp")
        self.on_broken(error)

    def stats(self, last_step_s: float = 0.0) -> InstanceStats:
        """Load of the lane that runs; totals of all lanes."""
        totals = {
            "total_stage_busy_s": self._clock.busy_s,
            "total_stage_idle_s": self._clock.idle_s,
        }
        if self._running is None:
            return self.dp.stats(last_step_s, self._idle_totals, **totals)
        return self.current.stats(
            last_step_s,
            self._idle_totals,
            shape=self._running.shape,
            is_follower=self.is_following,
            num_paused=self.dp.num_requests(),
            **totals,
        )

    def up_to_date(self, stats: InstanceStats) -> InstanceStats:
        """`stats` with what has changed since though this member takes no steps of its own. From any thread."""
        if not stats.is_follower:
            return stats
        return replace(stats, total_stage_busy_s=self._clock.busy_s, total_stage_idle_s=self._clock.idle_s)

    def _count_idle(self) -> None:
        """Totals of the lanes that do not run change only when another begins to: they are added up then."""
        idle = [lane for lane in (self.dp, *self._lanes.values()) if lane is not self.current]
        self._idle_totals = dict(sum((Counter(lane.totals()) for lane in idle), Counter(self._gone)))

    def close(self) -> None:
        """Frees everything."""
        if self._running is not None:
            self._running.leave()
        self.dp.close()
