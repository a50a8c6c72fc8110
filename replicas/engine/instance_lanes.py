"""All lanes of one instance (docs/architecture.md: changing the shape).

    registry   which lanes there are            `lane_registry.py`
    leases     which lane has which blocks      `leases.py`
    stepper    which lane runs                  `stepper.py`

Here is what concerns all three: requests, figures and laws of the instance.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import EngineError, HostTierError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.snapshot import InstanceStats
from pengserve.replicas.engine.groups.group_lane import GroupLane
from pengserve.replicas.engine.groups.group_run import GroupRun
from pengserve.replicas.engine.groups.leases import Leases
from pengserve.replicas.engine.groups.tp_lane import kv_view
from pengserve.replicas.engine.idle_profile import IdleProfile
from pengserve.replicas.engine.lane_registry import LaneRegistry
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from pengserve.replicas.engine.lanes.lane import Lane
from pengserve.replicas.engine.stepper import NO_OUTPUTS, Stepper
from pengserve.replicas.engine.tiers.parked import ParkedRequests, Pause
from pengserve.replicas.engine.vllm_seam import EngineCoreOutputs, EngineCoreRequest, Request
from pengserve.replicas.kv.tiers import DeviceTier
from pengserve.replicas.kv.transfers import Transfers
from pengserve.replicas.memory.kv_views import KvView

logger = logging.getLogger(__name__)


class Lanes:
    """Owned by the step thread, but for `prepare`. A `SteppedLane` of the step loop."""

    def __init__(self, config: InstanceConfig) -> None:
        """Builds the `dp` lane.

        Raises:
            ConfigError: an engine argument is not usable.
        """
        self.dp = DpLane(config)
        self.leases = Leases(self.dp)
        memory, ledger = self.dp.memory, self.leases.ledger
        self.tier = DeviceTier(memory.layers, ledger) if memory is not None else None
        self.transfers = Transfers(ledger)  # of KV and weights, beside the steps or between two of them
        self.registry = LaneRegistry(config, self.dp, self.leases.lease)
        self.on_broken: Callable[[BaseException], None] = lambda error: None  # the group that runs cannot go on
        # Requests of `dp` that cannot go on here, but in the group that runs.
        self.on_stranded: Callable[[list[str], InstanceKey | None], None] = lambda request_ids, leader: None
        self.num_sent_back: Callable[[], int] = lambda: 0  # requests that ingresses were told to send again
        self.before_tiers_end: Callable[[], None] = lambda: None  # what moves KV of `dp` is to end
        self.before_abort: Callable[[Collection[str]], None] = lambda ids: None  # ... of requests that are aborted
        self.capacity = self.dp.capacity
        self.stepper = Stepper(self.dp, self.transfers, lambda error: self.on_broken(error))
        self.num_migrated = 0  # requests that went on elsewhere with their KV, one by one,
        self.migrated_bytes = 0  # ... and that KV
        self.num_predicted = 0  # prompt tokens that ingresses expected in the prefix cache
        self._idle_totals: dict[str, int] = {}
        self._dp_view: KvView | None = None
        self._profile = IdleProfile(self.dp) if config.changes_shape else None

    def use_idle_time(self, is_wanted: Callable[[], bool]) -> None:
        """Does what can wait until an instance has nothing else to do; returns soon after `is_wanted()`."""
        if self._profile is None or self.running is not None or self.dp.has_work():
            return
        self._profile.advance(is_wanted)
        if self._profile.is_over:
            if (model := self._profile.model()) is not None:
                self.registry.assume(model)
            if samples := self._profile.samples:
                self.registry.tell_costs(samples)
            self._profile = None

    def dp_view(self) -> KvView:
        """KV of the `dp` lane, by physical block."""
        if self._dp_view is None:
            self._dp_view = kv_view(self.dp.worker.model_runner, self.dp.tiers)
        return self._dp_view

    # Which lane runs --------------------------------------------------------------------------------------------------

    @property
    def running(self) -> GroupLane | None:
        """The group's lane that runs now; None in dp."""
        return self.stepper.running

    @property
    def current(self) -> Lane:
        """The lane that takes requests here."""
        return self.stepper.current

    def refuse(self, shape: str, why: str) -> None:
        """No group of this shape can run here from now on. One that runs is left alone."""
        if self.running is None or self.running.shape != shape:
            self.registry.refuse(shape, why)

    def enter(self, lane: GroupLane, run: GroupRun) -> None:
        """From the next step on, `lane` runs. Requests that are still in `dp` wait there."""
        self.stepper.enter(lane, run)
        self._count_idle()

    def leave(self) -> None:
        """From the next step on, `dp` runs. The lane that ran has given up its requests and its blocks."""
        self.stepper.leave()
        self._show_tiers()
        self._count_idle()

    def abandon(self) -> list[str]:
        """Goes back to `dp` at once, in any state of the group's lane; ids of the requests that are lost with it."""
        lane = self.running
        assert lane is not None
        lost = [request.request_id for request in lane.requests()] if lane.leads else []
        self.discard(lane)
        return lost

    def discard(self, lane: GroupLane) -> None:
        """Takes all blocks from a lane, and builds it anew: its scheduler may hold requests. Where it runs, `dp` does.

        All memory comes back to where `dp` needs it, from this member's own copy.
        """
        if lane is self.running:
            self.leave()
        self.transfers.cancel_of(lane.name)
        lane.give_up_host()
        self.leases.return_all(lane)
        self._make_whole()
        self.registry.rebuild(lane)

    def _make_whole(self) -> None:
        """Gives all memory back to `dp`. Where that changes anything, `dp` forgets its cached prefixes.

        Raises:
            EngineError: a request held blocks of `dp` meanwhile.
        """
        memory = self.dp.memory
        if memory is not None and not memory.layers.is_whole():
            memory.make_whole()
            if self.dp.tiers is not None:
                self.dp.tiers.forget_all()
            self._show_tiers()
            if not self.dp.reset_prefix_cache():
                raise EngineError("requests held blocks of dp while another lane had its memory")

    def _show_tiers(self) -> None:
        """The tiers of `dp` see the memory of its KV where it is now; other lanes had it meanwhile."""
        memory = self.dp.memory
        if memory is not None and memory.layers.is_whole():
            memory.layers.mirror()

    def check(self) -> tuple[str, ...]:
        """Conservation laws, as sentences where one is broken."""
        wrong = [*self.leases.check(list(self.registry), self.running), *self.transfers.check()]
        if self.dp.memory is not None:
            wrong += (self.running or self.dp).check_memory(self.dp.memory.layers)
        if self.dp.tiers is not None:
            wrong += self.dp.tiers.check()
        return tuple(wrong)

    # Requests ---------------------------------------------------------------------------------------------------------

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
        self.before_abort(ids)
        self.dp.abort(ids)
        if self.current is not self.dp:
            self.current.abort(ids)

    def reorder(self, orders: Mapping[str, tuple[int, float]]) -> None:
        """Gives requests another `(priority, arrival_time)`, whichever lane they are in."""
        self.dp.reorder(orders)
        if self.current is not self.dp and self.current.leads:
            self.current.reorder(orders)

    def num_requests(self) -> int:
        """Running and waiting requests of all lanes."""
        return self.dp.num_requests() + (self.current.num_requests() if self.current is not self.dp else 0)

    def is_reading(self) -> bool:
        """Whether a request waits, or has not computed its prompt."""
        return self.dp.is_reading() or (self.current is not self.dp and self.current.is_reading())

    # Orders about requests, where there is a host tier: a group's leader carries them out for all members ----------

    def park(self, request_ids: Sequence[str]) -> list[str]:
        """Parks running requests until `resume`; those that were."""
        return [found for residency in self._residencies() for found in residency.park(request_ids)]

    def resume(self, request_ids: Sequence[str]) -> list[str]:
        """Requests that an order parked may go on, as soon as there is room; those that may.

        Those that a merge has left in `dp` go on in the group, from their tokens.
        """
        found = [found for residency in self._residencies() for found in residency.resume(request_ids)]
        if self.running is not None and (stranded := [i for i in found if self.dp.knows(i)]):
            self.dp.release(stranded)
            self.on_stranded(stranded, self.running.run.leader)
        return found

    def place(self, request_id: str, layers: Sequence[int]) -> bool:
        """Full blocks of a request are on the host alone in these layers from now on; whether the request is here."""
        return any(residency.place(request_id, layers) for residency in self._residencies())

    def take_pauses(self) -> list[Pause]:
        """Of requests that were parked and go on since the last call."""
        return [pause for residency in self._residencies() for pause in residency.take_pauses()]

    def _residencies(self) -> list[ParkedRequests]:
        """Of the lane that runs, and of `dp`, where requests may wait for it."""
        lanes = (self.dp,) if self.running is None else dict.fromkeys((self.current, self.dp))
        return [lane.residency for lane in lanes if lane.residency is not None]

    # Steps ------------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.stepper.has_work()

    def step(self) -> Mapping[int, EngineCoreOutputs]:
        """One step of the lane that runs. A group that breaks costs its requests their KV, never the instance; a copy
        between device and host that fails costs it the host tier.
        """
        try:
            outputs = self.stepper.step()
        except HostTierError:
            outputs = NO_OUTPUTS
        if (tiers := self.dp.tiers) is not None and tiers.failure:
            self._end_tiers()
        return outputs

    @property
    def is_mid_step(self) -> bool:
        """Whether a step is under way, beside which nothing but requests may come and go."""
        return self.dp.is_mid_step

    def end_step(self) -> Mapping[int, EngineCoreOutputs] | None:
        """Ends the oldest step that is under way; its outputs, or None: shapes, memory and KV may change."""
        return self.dp.end_step()

    def _end_tiers(self) -> None:
        """A copy has failed. A group that runs here dissolves first: what its lane has on the host is lost."""
        assert self.dp.tiers is not None
        if self.running is not None:
            self.stepper.break_off(HostTierError(self.dp.tiers.failure))
        if self.running is not None:
            return
        self.before_tiers_end()
        stranded = self.dp.give_up_tiers()
        logger.error("%s; dp serves on with the device alone", self.dp.worker.tier_failure)
        self.capacity, self._dp_view = self.dp.capacity, None
        self.registry.rebuild_all()
        self.on_stranded(stranded, None)

    def stats(self, last_step_s: float = 0.0) -> InstanceStats:
        """Load of the lane that runs; totals of all lanes."""
        clock, running = self.registry.clock, self.running
        totals = {
            "total_stage_busy_s": clock.busy_s,
            "total_stage_idle_s": clock.idle_s,
            "total_migrated": self.num_migrated,
            "total_migrated_bytes": self.migrated_bytes,
            "total_prefix_predicted": self.num_predicted,
            "total_sent_back": self.num_sent_back(),
        }
        if running is None:
            return self.dp.stats(last_step_s, self._idle_totals, **totals)
        return self.current.stats(
            last_step_s,
            self._idle_totals,
            shape=running.shape,
            is_follower=self.stepper.is_following,
            num_paused=self.dp.num_requests(),
            **totals,
        )

    def up_to_date(self, stats: InstanceStats) -> InstanceStats:
        """`stats` with what has changed since though this member takes no steps of its own. From any thread."""
        if not stats.is_follower:
            return stats
        clock, totals = self.registry.clock, Counter(self.dp.totals()) + Counter(self._idle_totals)
        return replace(
            stats,
            total_stage_busy_s=clock.busy_s,
            total_stage_idle_s=clock.idle_s,
            # Of requests that came, and went on to the leader at once.
            total_requests=totals["total_requests"],
            total_request_tokens=totals["total_request_tokens"],
            total_sent_again=totals["total_sent_again"],
            total_sent_back=self.num_sent_back(),
        )

    def _count_idle(self) -> None:
        """Totals of the lanes that do not run change only when another begins to: they are added up then."""
        idle = self.registry.totals_but(self.current)
        if self.current is not self.dp:
            idle += Counter(self.dp.totals())
        self._idle_totals = {name: total for name, total in idle.items() if total}

    def close(self) -> None:
        """Frees everything."""
        if self.running is not None:
            self.running.leave()
        self.dp.close()
