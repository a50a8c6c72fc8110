"""One simulation, from its configuration to its result."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pengserve.controller.events import EventDraft, EventLog
from pengserve.controller.loop import Controller
from pengserve.planners.groups import expand
from pengserve.planners.types.config import ControllerConfig, MigrateConfig
from pengserve.planners.types.errors import ConfigError, EngineError, PengServeError
from pengserve.planners.types.events import Event
from pengserve.planners.types.ids import NO_VERSION, InstanceId
from pengserve.planners.types.layout import Group
from pengserve.planners.types.plans import LayoutTarget
from pengserve.planners.types.snapshot import Demand, InstanceState
from pengserve.planners.types.strategy import SwitchStrategy
from pengserve.simulator.build import arrivals_of, machine_of, setup_of
from pengserve.simulator.clock import run_virtual
from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.engine.port import SimPort
from pengserve.simulator.engine.scheduler import CountsCopies
from pengserve.simulator.ingress import IngressLimits, SimIngress
from pengserve.simulator.machine import Machine
from pengserve.simulator.outcomes import Outcomes
from pengserve.simulator.policies.policy import Setup
from pengserve.simulator.requests import Arrival
from pengserve.simulator.result import Result
from pengserve.simulator.sampling import Sampler

DEMAND_PERIOD_S, DEMAND_REPEAT_S = 0.2, 2.0  # of reports to the controller, as in production
READY_PERIOD_S = 0.05  # how often it is looked whether all is ready for traffic
READY_TIMEOUT_S = 600.0
STUCK_S = 1800.0  # without a token or an arrival, requests are given up: they would wait for ever


class Progress(NamedTuple):
    """How far a simulation has come."""

    at_s: float
    span_s: float  # when the last request comes, or the horizon
    num_ended: int
    num_requests: int


OnProgress = Callable[[Progress], None]


class RecordedLog(EventLog):
    """Keeps all events in memory, however many they are."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        super().__init__(wall_clock=wall_clock)
        self.events: list[Event] = []

    def append(self, changes: Any) -> tuple[Event, ...]:
        """Logs `changes` in order, keeps them for the report, and returns them as events."""
        found: tuple[EventDraft, ...] = tuple(changes)
        events = super().append(found)
        self.events += events
        return events


class Simulation:
    """One run. Everything is on one loop of virtual time."""

    def __init__(
        self,
        config: SimulationConfig,
        setup: Setup,
        machine: Machine,
        arrivals: Sequence[Arrival],
        progress: OnProgress,
    ) -> None:
        self.config, self.setup, self.machine = config, setup, machine
        self._arrivals, self._on_progress = sorted(arrivals, key=lambda a: (a.at_s, a.request_id)), progress
        if len({arrival.request_id for arrival in self._arrivals}) < len(self._arrivals):
            raise ConfigError("two requests of the trace have the same id: give each its own")
        self._next = 0  # arrival
        last_s = self._arrivals[-1].at_s if self._arrivals else 0.0
        self._span_s = last_s if config.horizon_s is None else config.horizon_s
        self._failure: BaseException | None = None

    def run_to_end(self) -> Result:
        """Runs it in virtual time. Once."""
        try:
            return run_virtual(self._run())
        except BaseExceptionGroup as group:
            raise _first(group) from None

    async def _run(self) -> Result:
        loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        loop.set_exception_handler(self._fail)
        log = RecordedLog(loop.time)
        self.outcomes = Outcomes(on_all=self._over.set, num_requests=len(self._arrivals))
        self.ingress = SimIngress(IngressLimits(**self.config.limits.model_dump()), self.outcomes.end)
        self.cluster = self.machine.cluster(self.ingress, self.outcomes.gaps)
        self.ingress.serve(
            self.cluster,
            self.setup.dispatch,
            num_ingresses=self.config.cluster.ingresses,
            finds_prefixes=self.machine.finds_prefixes,
        )
        controller = Controller(
            self._controller_config(), SimPort(self.cluster), log, clock=loop.time, wall_clock=loop.time
        )
        self.controller = controller
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(controller.run()), group.create_task(self._follow_routes())]
            await self._until_ready()
            start_s = self.outcomes.start_s = loop.time()
            sampler = Sampler(self.cluster, self.ingress, controller, self.outcomes)
            works = [*self._asked(), self._report_demand(), self._watch(sampler)]
            tasks += [group.create_task(work) for work in works]
            if self.setup.companion is not None:
                tasks.append(group.create_task(self.setup.companion(self.cluster)))
            self._feed()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.config.horizon_s):
                    await self._over.wait()
            sampler.take()
            end_s = loop.time() - start_s
            for task in tasks[1:]:
                task.cancel()
            await controller.stop()
            tasks[0].cancel()
        if self._failure is not None:
            raise self._failure
        self.outcomes.give_up(self.ingress.requests(), "the simulation ended before it did")
        return self._result(sampler, end_s, log)

    def _result(self, sampler: Sampler, end_s: float, log: RecordedLog) -> Result:
        return Result(
            name=self.config.name,
            policy=self.config.policy.name,
            seed=self.config.seed,
            config=self.config.model_dump(mode="json"),
            assumptions=self.machine.assumptions,
            end_s=end_s,
            num_instances=self.config.cluster.instances,
            outcomes=self.outcomes.by_arrival(self._arrivals),
            moments=tuple(sampler.moments),
            gaps=self.outcomes.gaps.gaps(),
            events=tuple(_shifted(event, self.outcomes.start_s) for event in log.events),
            copied=self._copied(),
            instance_kv=tuple(sampler.instance_kv),
        )

    def _copied(self) -> tuple[tuple[str, float], ...]:
        """Totals of the instances that live at the end."""
        totals = Counter[str]()
        for instance in self.cluster.living():
            scheduler = instance.lane.scheduler
            if isinstance(scheduler, CountsCopies):
                totals.update(scheduler.copied())
        return tuple(sorted((name, float(value)) for name, value in totals.items()))

    def _controller_config(self) -> ControllerConfig:
        return ControllerConfig(
            app=self.config.name,
            num_instances=self.config.cluster.instances,
            degrees=self.setup.degrees,
            merge=self.setup.merge,
            drop=self.setup.drop,
            migrate=MigrateConfig(redirects=self.setup.redirects),
            judge=self.setup.judge,
            **self.config.controller.model_dump(),
        )

    # Before the first request -----------------------------------------------------------------------------------------

    async def _until_ready(self) -> None:
        """Waits until all instances are READY and routed to, in the pinned layout where there is one."""
        deadline_s = asyncio.get_running_loop().time() + READY_TIMEOUT_S
        is_asked = not self.setup.layout
        while not (is_asked and self._is_ready()):
            await asyncio.sleep(READY_PERIOD_S)
            if not is_asked and self._can_pin():
                self.controller.set_layout(LayoutTarget(groups=self.setup.layout))
                is_asked = True
            if asyncio.get_running_loop().time() > deadline_s:
                raise EngineError(f"the cluster was not ready after {READY_TIMEOUT_S:g} virtual seconds")

    def _can_pin(self) -> bool:
        with suppress(EngineError):
            possible = self.controller.state().wiring.topology.groups
            return self._all_ready() and set(self.setup.layout) <= set(possible)
        return False

    def _all_ready(self) -> bool:
        ready = [i for i in self.cluster.living() if i.state is InstanceState.READY]
        return len(ready) == self.config.cluster.instances

    def _is_ready(self) -> bool:
        with suppress(EngineError):
            state = self.controller.state()
            has_layout = set(self.setup.layout) <= set(state.layout.groups)
            is_wired = not state.config.is_elastic or state.wiring.is_placed
            return self._all_ready() and has_layout and is_wired and self.ingress.num_routes == len(state.layout.groups)
        return False

    # While requests come ----------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Hands over all requests that are due, and comes back for the next one."""
        loop, start_s = asyncio.get_running_loop(), self.outcomes.start_s
        while self._next < len(self._arrivals):
            arrival = self._arrivals[self._next]
            due_s = start_s + arrival.at_s + self.config.cluster.request_s
            if due_s > loop.time():
                loop.call_at(due_s, self._feed_one)
                return
            self._next += 1
            self.ingress.add(arrival)
        if not self._arrivals:
            self._over.set()

    def _feed_one(self) -> None:
        arrival = self._arrivals[self._next]
        self._next += 1
        self.ingress.add(arrival)
        self._feed()

    async def _follow_routes(self) -> None:
        version = NO_VERSION
        while True:
            with suppress(EngineError):
                table = await self.controller.routing(version, READY_TIMEOUT_S)
                if table.version > version:
                    version = table.version
                    self.ingress.route(table)

    async def _report_demand(self) -> None:
        """As `cluster.ingress.demand`: a demand that changes at once, one that stays once in a while."""
        sent, sent_s = Demand(), 0.0
        while True:
            demand, now_s = self.ingress.demand(), asyncio.get_running_loop().time()
            if demand != sent or (demand != Demand() and now_s - sent_s >= DEMAND_REPEAT_S):
                self.controller.report_demand("ingress", demand)
                sent, sent_s = demand, now_s
            await asyncio.sleep(DEMAND_PERIOD_S)

    async def _watch(self, sampler: Sampler) -> None:
        """Takes a sample now and then, and ends what would wait for ever."""
        loop = asyncio.get_running_loop()
        moved, moved_s = (-1, -1), 0.0
        while True:
            sampler.take()
            now_s, num_ended = loop.time() - self.outcomes.start_s, self.outcomes.num_ended
            self._on_progress(Progress(now_s, self._span_s, num_ended, len(self._arrivals)))
            seen = self._next, sampler.num_generated
            if seen != moved:
                moved, moved_s = seen, now_s
            elif self._next == len(self._arrivals) and now_s - moved_s > STUCK_S:
                self._over.set()
            await asyncio.sleep(self.config.sample_s)

    def _asked(self) -> list[Any]:
        """What people and fate do, by the configuration."""

        async def die(instance: int, at_s: float) -> None:
            await asyncio.sleep(at_s)
            found = self.cluster.newest(InstanceId(instance))
            if found is not None:
                self.cluster.die(found.key)

        async def lay_out(groups: tuple[Group, ...] | None, strategy: str, at_s: float) -> None:
            await asyncio.sleep(at_s)
            if groups is None:
                self.controller.auto_layout()
            else:
                self.controller.set_layout(LayoutTarget(groups=groups, strategy=SwitchStrategy(strategy)))

        layouts = [(self._groups(change.layout), change.strategy, change.at_s) for change in self.config.layouts]
        deaths = [(death.instance, death.at_s) for death in self.config.deaths]
        return [*(lay_out(*layout) for layout in layouts), *(die(*death) for death in deaths)]

    def _groups(self, layout: str) -> tuple[Group, ...] | None:
        """The groups of a layout that is asked for; None: the planners decide."""
        if layout == "auto":
            return None
        ranks = [InstanceId(i) for i in range(self.config.cluster.instances)]
        try:
            return expand(layout, self.controller.state().wiring.topology.groups, ranks)
        except ValueError as error:
            raise ConfigError(f"layouts: {error}") from None

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error in a callback, which no task awaits, ends the run."""
        self._failure = context.get("exception") or PengServeError(str(context.get("message")))
        self._over.set()


def simulate(
    config: SimulationConfig, arrivals: Sequence[Arrival] | None = None, on_progress: OnProgress | None = None
) -> Result:
    """Runs what `config` describes; `arrivals` stand in place of its trace. The same seed gives the same result.

    Raises:
        ConfigError: something in it is unknown or impossible; one sentence that names the field.
    """
    setup = setup_of(config)
    machine = machine_of(config, setup)
    found = arrivals_of(config) if arrivals is None else arrivals
    return Simulation(config, setup, machine, found, on_progress or (lambda progress: None)).run_to_end()


def _shifted(event: Event, start_s: float) -> Event:
    """With its time from the start of the traffic on."""
    return Event(
        seq=event.seq, time_s=event.time_s - start_s, kind=event.kind, why=event.why, span=event.span, data=event.data
    )


def _first(error: BaseException) -> BaseException:
    """The error behind groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
