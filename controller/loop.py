"""The control loop: observe -> plan -> act -> log, once a tick and at once on news.

Switches of the layout run beside the ticks (`coordinator.py`), so ticks supervise instances while a switch waits.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from pengserve.controller import drains, recovery
from pengserve.controller import layout as layouts
from pengserve.controller import state as transitions
from pengserve.controller.coordinator import Coordinator
from pengserve.controller.events import EventDraft, EventLog
from pengserve.controller.ports import ReplicaPort
from pengserve.controller.state import ClusterState, Transition
from pengserve.controller.steering import Steering
from pengserve.controller.supervision import KILL_TIMEOUT_S, Supervision
from pengserve.controller.terms import LocalTermStore, Term
from pengserve.planners.shared_usage import UsageLedger
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.drains import DrainOperation
from pengserve.planners.types.errors import EngineError, SupersededError
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import InstanceKey, Version
from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.plans import LayoutTarget
from pengserve.planners.types.snapshot import ClusterSnapshot, Demand, RoutingTable
from pengserve.planners.types.tenants import SharedUsage, UsageReport

logger = logging.getLogger(__name__)

_RECOVERY_RETRY_S = 1.0
_MOST_BEGUN = 4  # switches that one tick begins: with a thousand instances each costs 4 ms of processor time
_MIN_PERIOD_S = 0.02  # a call that fails at once, again and again, must not make the loop spin


class Controller:
    """Owns the cluster's state. All methods run on one event loop, and none of them blocks it.

    consumes: answers of instances, `report_lost`, `report_demand`, `set_layout`, `drain`
    produces: instances, directories of peers, switches of the layout, routing tables, events
    waits for: a tick, or news that cannot wait for one
    ends: by `stop`, or where a controller of a newer term has taken over
    is unblocked by: the end of a create, drain, kill or switch; an instance that is gone; a report of an ingress
    """

    def __init__(
        self,
        config: ControllerConfig,
        port: ReplicaPort,
        log: EventLog,
        term: Term | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            term: that `port` sends with its calls; None: no other controller of this application exists.
        """
        self.config = config
        self._port, self._log = port, log
        self._term = term or Term(LocalTermStore())
        self._clock = clock
        self._started_s = wall_clock()
        self._started_clock_s = clock()
        self._past = log.tail(limit=1 << 30)
        self._state: ClusterState | None = None  # None until recovered
        self._news = asyncio.Event()
        self._changed = asyncio.Condition()
        self._usage = UsageLedger()
        self._steering = Steering(config, clock)
        self._supervision = Supervision(
            config, port, self._term, self, on_news=self._news.set, clock=clock, paying=self._paying_moves
        )
        self._coordinator = Coordinator(config, port, self, on_end=self._news.set, clock=clock, wall_clock=self._time_s)
        self._drain_errors = 0
        self._stopped = False
        self._successor = ""  # why nothing is done here any more

    # What the world asks ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Recovers, then ticks until `stop`. An error in one tick is logged and costs that tick alone."""
        self._log.append([EventDraft(kind=EventKind.CONTROLLER_START, span=self._span, why=f"app {self.config.app}")])
        while not self._stopped:
            self._news.clear()
            period_s = self.config.tick_s
            try:
                if self._state is None:
                    await self.recover()
                if self._term.is_over:
                    await self._give_way()
                    return
                await self.tick()
            except Exception:
                # Supervision must outlive any one failure, also one of its own code: the next tick observes anew.
                logger.exception("a tick of the controller failed")
                period_s = max(period_s, _RECOVERY_RETRY_S)
            await asyncio.sleep(_MIN_PERIOD_S)
            try:
                # Not `wait_for`: in Python 3.11 it swallows a cancellation that comes together with the news.
                async with asyncio.timeout(period_s):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def routing(self, known_version: Version, timeout_s: float) -> RoutingTable:
        """The table once its version is above `known_version`, or at the time-out the one there is.

        Raises:
            EngineError: the controller has not recovered within `timeout_s`; ask again, and keep the table you have.
        """
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: self._is_newer_than(known_version))
            except TimeoutError:
                logger.debug("no newer routes than %s", known_version)
        return self._ready_state().routing

    async def recovered(self, timeout_s: float) -> None:
        """Waits until the controller knows its cluster.

        Raises:
            EngineError: it does not within `timeout_s`.
        """
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: bool(self._successor) or self._state is not None)
            except TimeoutError:
                self._ready_state()

    def snapshot(self) -> ClusterSnapshot:
        """The cluster as it was at the last tick.

        Raises:
            EngineError: the controller has not recovered yet.
        """
        state = self._ready_state()
        cluster = transitions.snapshot(state, time_s=self._time_s(), started_s=self._started_s, now_s=self._clock())
        return replace(
            cluster,
            demands=self._steering.demands(),
            policy=self._steering.policy,
            last_switch=self._coordinator.record,
            switching=self._coordinator.under_way,
            resting=self._coordinator.resting,
        )

    def _paying_moves(self, orders: tuple[Migrate, ...]) -> tuple[Migrate, ...]:
        if not orders:
            return ()
        paying, news = self._steering.paying_moves(orders, self.snapshot())
        self._log.append(news)
        return paying

    def events(self, after: int = 0, limit: int = 100) -> tuple[Event, ...]:
        """At most `limit` events with a number above `after`."""
        return self._log.tail(after, limit)

    def report_lost(self, key: InstanceKey, why: str) -> None:
        """An ingress has lost its link to `key`: looks at once. Only what the instance's own actor says counts."""
        logger.info("an ingress lost its link to instance %s: %s", key, why)
        self._news.set()

    def report_demand(self, client_id: str, demand: Demand) -> None:
        """What an ingress wants and has not got. It is forgotten after a while, so it is reported again and again."""
        if self._steering.hear(client_id, demand):
            self._news.set()

    def share_usage(self, client_id: str, report: UsageReport) -> SharedUsage:
        """What an ingress has charged tenants, and what all ingresses together have. Nothing else is decided by it."""
        return self._usage.share(client_id, report, self._clock())

    def set_layout(self, target: LayoutTarget) -> None:
        """Changes the layout to `target`, step by step, and keeps it so until `auto_layout`; returns at once.

        Raises:
            PlanError: this cluster can never be laid out so; says what it can.
        """
        possible = self._ready_state().wiring.topology.groups
        self._log.append([self._steering.pin(target, self.snapshot(), possible)])
        self._coordinator.forgive()
        self._news.set()

    def auto_layout(self) -> None:
        """Lets the planners decide about the layout again."""
        self._log.append([self._steering.release()])
        self._coordinator.forgive()
        self._news.set()

    async def drain(self, timeout_s: float) -> bool:
        """Drains all instances, then ends them; True where all had finished what they ran. Nothing starts after it."""
        errors_before = self._drain_errors
        state = self._ready_state()
        if not state.closing:
            await self._accept(transitions.drain_all(state, "the application is drained", timeout_s, self._clock()))
        self._news.set()
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s + KILL_TIMEOUT_S):
                    await self._changed.wait_for(self._is_over)
            except TimeoutError:
                return False
        return self._drain_errors == errors_before

    @property
    def is_superseded(self) -> bool:
        """Whether it has ended because a controller of a newer term has taken over."""
        return bool(self._successor)

    async def drain_instance(self, instance_id: int, timeout_s: float) -> DrainOperation:
        """Empties one instance and keeps its slot empty; returns at once, with the operation as it is then. Idempotent.

        What cannot move within `timeout_s` is sent again elsewhere from its tokens.

        Raises:
            PlanError: it cannot be drained; says why.
        """
        await self._accept(drains.begin(self._ready_state(), instance_id, timeout_s, self._clock()))
        self._news.set()
        return self.drain_operation(instance_id)

    def drain_operation(self, instance_id: int) -> DrainOperation:
        """The drain of an instance as it is now. Raises PlanError where it is not drained."""
        return drains.operation(self._ready_state(), instance_id)

    async def undrain(self, instance_id: int) -> None:
        """Fills a drained slot again.

        Raises:
            PlanError: it is not drained, or its drain is not over.
        """
        await self._accept(drains.undo(self._ready_state(), instance_id, self._clock()))
        self._news.set()

    async def stop(self) -> None:
        """Ends the loop. Instances live on, for the next controller or until their lease ends."""
        await self._end("asked to", "the controller was stopped")

    async def _give_way(self) -> None:
        """Ends the loop for the controller that has taken over. From now on every question is refused."""
        why = f"controller term {self._term.newest} has taken over from term {self._term.number}"
        logger.warning("%s; this controller does nothing any more", why)
        await self._end(why, why)
        self._successor = why
        async with self._changed:
            self._changed.notify_all()

    async def _end(self, why: str, why_no_switch: str) -> None:
        if not self._stopped:
            self._stopped = True
            self._news.set()
            await self._coordinator.close(why_no_switch)
            await self._supervision.close()
            self._log.append([EventDraft(kind=EventKind.CONTROLLER_STOP, span=self._span, why=why)])
            self._log.close()

    # One tick ---------------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Takes over what an earlier controller left."""
        found = await recovery.recover(self.config, self._port, self._term, self._past, self._clock())
        if self._term.is_over:
            return
        self._log.append(recovery.close_open_spans(self._past, found.state.slots))
        self._steering.remember(self._past)
        self._past = ()
        await self._accept(found)
        data = {
            "num_adopted": sum(slot.alive for slot in found.state.slots),
            "term": found.state.routing.version.term,
            "version": found.state.routing.version.counter,
            "epoch": found.state.layout.epoch,
        }
        why = "every application begins so"
        if any(len(group.members) > 1 for group in found.state.layout.groups):
            why = "the instances run it so"
        self._log.append(
            [
                EventDraft(kind=EventKind.CONTROLLER_RECOVERED, span=self._span, data=data),
                layouts.changed(found.state.layout, why),
            ]
        )

    async def tick(self) -> None:
        """Observes all instances, plans, begins what the plan asks for."""
        calls = self._supervision
        await calls.ask()
        seen = calls.collect()
        now_s = self._clock()
        # `drain` may have run while this waited: read the state again, and let nothing await until it is written.
        await self._accept(transitions.observe(self._ready_state(), seen, now_s))
        await calls.act(now_s)
        if self._term.is_over:
            return
        calls.connect()
        if self._ready_state().leaving:
            await self._accept(drains.go_on(self._ready_state(), now_s))
        calls.order(now_s)
        self._steer()
        if self.config.is_elastic:
            calls.redirect(self.snapshot, now_s)

    def _steer(self) -> None:
        """Begins the switches of the layout that are due, beside those under way."""
        if not self.config.is_elastic or self._ready_state().closing:
            return
        for _ in range(_MOST_BEGUN):
            plan, news = self._steering.next_switch(self.snapshot(), self._ready_state().leaving)
            self._log.append(news)
            if plan is None:
                return
            self._coordinator.begin(plan)

    def state(self) -> ClusterState:
        """The state that counts now, for the coordinator and the supervision."""
        return self._ready_state()

    async def update(self, change: Callable[[ClusterState], Transition]) -> None:
        """Applies `change` to the state that counts now, for the coordinator and the supervision."""
        await self._accept(change(self._ready_state()))

    async def _accept(self, transition: Transition) -> None:
        """Makes the transition's state the one that counts, logs what happened, and wakes who waits for it."""
        self._state = transition.state
        self._log.append(transition.changes)
        self._drain_errors += sum(change.kind is EventKind.INSTANCE_DRAIN_ERROR for change in transition.changes)
        async with self._changed:
            self._changed.notify_all()

    def _is_newer_than(self, version: Version) -> bool:
        return bool(self._successor) or (self._state is not None and self._state.routing.version > version)

    def _is_over(self) -> bool:
        state = self._ready_state()
        return not state.strays and not state.outgoing and not any(slot.alive or slot.doomed for slot in state.slots)

    def _ready_state(self) -> ClusterState:
        if self._successor:
            raise SupersededError(f"{self._successor}; ask that one")
        if self._state is None:
            raise EngineError("the controller is still recovering; ask again in a moment")
        return self._state

    def _time_s(self) -> float:
        """Seconds since the Unix epoch. The wall clock is read at the start alone: planners must not see it jump."""
        return self._started_s + self._clock() - self._started_clock_s

    @property
    def _span(self) -> str:
        return f"controller:{self._started_s:.3f}"
