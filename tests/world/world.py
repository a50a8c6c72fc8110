"""One deterministic world: production code on a virtual loop, with the faults of one scenario."""

import asyncio
import logging
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pengserve.planners.types.config import ControllerConfig, MergeConfig
from pengserve.planners.types.errors import PengServeError
from pengserve.planners.types.layout import parse_groups
from pengserve.planners.types.plans import LayoutTarget
from pengserve.simulator.clock import run_virtual
from tests.world.answers import Answers
from tests.world.chaos import Chaos, InjectedError
from tests.world.cluster import CONTROLLERS, WorldCluster
from tests.world.controllers import ControllerProcess, Controllers
from tests.world.faults import HEALED_S, Fault, Kind, Scenario
from tests.world.ingress import IngressProcess
from tests.world.instance import DEGREES
from tests.world.laws import broken_at_the_end, unfinished

REST_S = 100.0  # after which a healed world must be at rest
LOOK_S = 1.0
QUIET_LOOKS = 3  # in a row


class LawBroken(AssertionError):
    """A law of the world does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a world went."""

    broken: str  # the first law that was broken, and when; empty where all held
    virtual_s: float
    num_ended: int


class World:
    """All parts of one run."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        self.scenario, self.directory = scenario, directory
        self.chaos = Chaos(scenario.seed)
        self.answers = Answers(scenario.lengths, scenario.poison, self.breaks)
        self.cluster = WorldCluster(
            self.chaos, self.answers, is_elastic=scenario.is_elastic, num_ingresses=scenario.num_ingresses
        )
        self.log_path = directory / "events.jsonl"
        self.controllers = Controllers(_config(scenario), self.cluster, self.log_path)
        self.ingresses: dict[int, IngressProcess] = {}
        self.dead_ingresses: list[IngressProcess] = []
        for index in range(scenario.num_ingresses):
            self._start_ingress(index)
        self._broken = asyncio.get_running_loop().create_future()
        self._under_way: set[asyncio.Task[None]] = set()

    def breaks(self, law: str) -> None:
        """A law does not hold: the run ends with its sentence."""
        if not self._broken.done():
            self._broken.set_result(f"at {self.chaos.now_s:.2f} s: {law}")

    async def run(self) -> Outcome:
        """Runs the scenario, then waits until the world is at rest."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        work = loop.create_task(self._work())
        await asyncio.wait({work, self._broken}, return_when=asyncio.FIRST_COMPLETED)
        if work.done() and (error := work.exception()) is not None:
            raise error
        work.cancel()
        broken = self._broken.result() if self._broken.done() else ""
        everything = [*self.ingresses.values(), *self.dead_ingresses]
        return Outcome(broken=broken, virtual_s=loop.time(), num_ended=sum(len(i.ends) for i in everything))

    async def _work(self) -> None:
        arrivals = enumerate(self.scenario.arrivals_s)
        moments: list[tuple[float, Any]] = [(at_s, number) for number, at_s in arrivals if at_s is not None]
        moments += [(fault.at_s, fault) for fault in self.scenario.faults]
        moments += [
            (at_s, Fault(at_s=at_s, kind=Kind.LEAVE, target=number))
            for number, at_s in enumerate(self.scenario.leave_s)
            if at_s is not None
        ]
        for at_s, what in sorted(moments, key=lambda moment: moment[0]):
            await asyncio.sleep(at_s - self.chaos.now_s)
            if isinstance(what, Fault):
                self._begin(self._strike(what))
            else:
                self._ask(what)
        await asyncio.sleep(HEALED_S - self.chaos.now_s)
        await self._heal()
        await self._rest()

    def _ask(self, number: int) -> None:
        ingress = self.ingresses.get(number % self.scenario.num_ingresses)
        if ingress is not None:
            ingress.ask(number)

    async def _heal(self) -> None:
        """No fault from now on: processes that were stopped or killed run again."""
        await asyncio.gather(*self._under_way)
        self.chaos.heal()
        for instance in self.cluster.living():
            instance.resume()
        if not self.controllers.newest.is_alive:
            self.controllers.start()

    async def _rest(self) -> None:
        deadline_s, num_quiet = self.chaos.now_s + REST_S, 0
        while num_quiet < QUIET_LOOKS:
            await asyncio.sleep(LOOK_S)
            missing = list(unfinished(self))
            num_quiet = 0 if missing else num_quiet + 1
            if missing and self.chaos.now_s > deadline_s:
                self.breaks("healed and not at rest: " + "; ".join(missing))
                return
        for law in broken_at_the_end(self):
            self.breaks(law)

    # Faults -----------------------------------------------------------------------------------------------------------

    async def _strike(self, fault: Fault) -> None:
        until_s = self.chaos.now_s + fault.seconds
        instance = self.cluster.newest_of(fault.target)
        match fault.kind:
            case Kind.CRASH if instance:
                instance.die()
            case Kind.ENGINE_FAILURE if instance:
                instance.fail()
            case Kind.STOP if instance:
                instance.stop(fault.seconds)
            case Kind.CUT_INGRESS:
                self.chaos.cut(f"ingress{fault.target}", f"node{fault.other}", until_s)
            case Kind.CUT_CONTROLLER:
                self.chaos.cut(CONTROLLERS, f"node{fault.target}", until_s)
            case Kind.CUT_SOURCE:
                self.chaos.cut(CONTROLLERS, f"ingress{fault.target}", until_s)
            case Kind.CONTROLLER_DEATH:
                await self._replace_controller(self.controllers.newest, fault.seconds)
            case Kind.SECOND_CONTROLLER:
                older = self.controllers.newest
                self.controllers.start()
                if fault.seconds:
                    await asyncio.sleep(fault.seconds)
                    await older.kill()
            case Kind.INGRESS_DEATH:
                await self._replace_ingress(fault.target, fault.seconds)
            case Kind.CLOCK:
                self.chaos.wall_shift_s += fault.seconds
            case Kind.EXCEPTION:
                self.chaos.armed[fault.point] += 1
            case Kind.SLOW_RAY:
                self.chaos.is_ray_slow_until_s = until_s
            case Kind.FULL_DISK:
                self.chaos.free_bytes = fault.target
                await asyncio.sleep(fault.seconds)
                self.chaos.free_bytes = 1 << 40
            case Kind.SHORT_WRITES:
                self.chaos.bytes_a_call = fault.target
                await asyncio.sleep(fault.seconds)
                self.chaos.bytes_a_call = 1 << 40
            case Kind.TORN_LINE:
                self._tear(fault.target)
            case Kind.LEAVE:
                for ingress in self.ingresses.values():
                    ingress.leave(fault.target)
            case Kind.LAYOUT:
                self._lay_out(fault.target)

    async def _replace_controller(self, process: ControllerProcess, seconds: float) -> None:
        await process.kill()
        await asyncio.sleep(seconds)
        if not self.controllers.newest.is_alive:
            self.controllers.start()

    async def _replace_ingress(self, index: int, seconds: float) -> None:
        ingress = self.ingresses.pop(index, None)
        if ingress is not None:
            self.dead_ingresses.append(ingress)
            await ingress.kill()
            await asyncio.sleep(seconds)
            self._start_ingress(index)

    def _start_ingress(self, index: int) -> None:
        self.ingresses[index] = IngressProcess(f"ingress{index}", self.cluster, self.controllers, self.answers)

    def _tear(self, num_bytes: int) -> None:
        if self.log_path.exists():
            with self.log_path.open("r+b") as file:
                file.truncate(max(0, self.log_path.stat().st_size - num_bytes))

    def _lay_out(self, wish: int) -> None:
        controller = self.controllers.newest.controller
        try:
            if wish == 0:
                controller.auto_layout()
            else:
                firsts = range(0, self.scenario.num_instances - 1, 2) if wish == 2 else ()
                groups = parse_groups(" ".join(f"tp2@({first},{first + 1})" for first in firsts))
                controller.set_layout(LayoutTarget(groups=groups))
        except PengServeError:
            return  # the user reads why

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, InjectedError):
            self.breaks(f"an error that no code took: {context.get('message')}: {error!r}")


class _Faults(logging.Handler):
    """An error that production code logs with its traceback breaks a law, unless a fault was its cause."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not _is_injected(error):
            self._world.breaks(f"{record.getMessage()}: {type(error).__name__}: {error}")


def _is_injected(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, InjectedError):
            return True
        error = error.__cause__ or error.__context__
    return False


def run(scenario: Scenario) -> Outcome:
    """Runs one world to its end."""

    async def main(directory: str) -> Outcome:
        world = World(scenario, Path(directory))
        handler = _Faults(world)
        logger = logging.getLogger("pengserve")
        before = logger.level, logger.propagate
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        try:
            return await world.run()
        finally:
            logger.removeHandler(handler)
            logger.level, logger.propagate = before

    with tempfile.TemporaryDirectory(prefix="world-", dir=_fast_directory()) as directory:
        return run_virtual(main(directory))


def without_faults(scenario: Scenario, kept: list[int]) -> Scenario:
    """The scenario with the faults of these indices alone."""
    return replace(scenario, faults=tuple(scenario.faults[i] for i in kept))


def _config(scenario: Scenario) -> ControllerConfig:
    return ControllerConfig(
        app="world",
        num_instances=scenario.num_instances,
        lost_after_s=4.0,
        status_timeout_s=2.0,
        start_timeout_s=20.0,
        restart_backoff_s=0.5,
        restart_backoff_max_s=4.0,
        drain_timeout_s=5.0,
        degrees=DEGREES if scenario.is_elastic else (),
        merge=MergeConfig(is_auto=False),
        prepare_timeout_s=2.0,
        commit_timeout_s=5.0,
    )


def _fast_directory() -> str | None:
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() else None
