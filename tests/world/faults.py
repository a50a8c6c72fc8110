"""What can go wrong in the world, and a draw of it from a seed."""

from dataclasses import dataclass
from enum import StrEnum
from random import Random

CALM_S = 1.0  # of seconds at the start without a fault
STORM_S = 16.0  # when the last fault begins at the latest; at the storm's end everything heals
HEALED_S = 20.0
LONG, ENDLESS = 150, 900  # tokens of answers that no client waits for
POISON_SHARE = 0.1  # of the seeds: one of their requests kills instances; in half of them nothing else goes wrong


class Kind(StrEnum):
    """Kinds of faults. In brackets: what `target` names, and what `seconds` are."""

    CRASH = "crash"  # SIGKILL of an instance [slot]
    ENGINE_FAILURE = "engine_failure"  # the engine of an instance fails, its process lives [slot]
    STOP = "stop"  # SIGSTOP of an instance, and SIGCONT [slot; how long]
    CUT_INGRESS = "cut_ingress"  # a network partition between an ingress and an instance [ingress, slot; how long]
    CUT_CONTROLLER = "cut_controller"  # ... between all controllers and an instance [slot; how long]
    CUT_SOURCE = "cut_source"  # ... between an ingress and all controllers [ingress; how long]
    CONTROLLER_DEATH = "controller_death"  # SIGKILL of the newest controller [-; until the next one starts]
    SECOND_CONTROLLER = "second_controller"  # another one starts beside it [-; until the older one is killed; 0: never]
    INGRESS_DEATH = "ingress_death"  # SIGKILL of an ingress and all its clients [ingress; until the next one starts]
    CLOCK = "clock"  # the wall clock jumps [-; by how much, to either side]
    EXCEPTION = "exception"  # the next call of a function raises [name of the function]
    SLOW_RAY = "slow_ray"  # Ray's answers are late, and stale when they come [-; how long]
    FULL_DISK = "full_disk"  # the disk takes some bytes, then none [bytes; how long]
    SHORT_WRITES = "short_writes"  # the disk takes a few bytes a call [bytes; how long]
    TORN_LINE = "torn_line"  # the log's last line loses its end, as by a crash of the machine [bytes]
    LEAVE = "leave"  # a client goes away [request]
    LAYOUT = "layout"  # a user asks for another layout [0: auto, 1: dp, 2: pairs]


_OFTEN = (Kind.CRASH, Kind.EXCEPTION, Kind.EXCEPTION, Kind.EXCEPTION, Kind.LAYOUT, Kind.LAYOUT, Kind.LEAVE)

POINTS = (
    "ingress.on_table", "ingress.on_up", "ingress.on_batch", "ingress.on_moved", "ingress.on_trial", "ingress.on_down",
    "events.on_ended", "events.on_dispatched", "events.on_resumed", "events.on_request_moved", "events.on_failed",
    "link.write", "source.routing", "source.report_lost", "source.report_demand", "ingress.connect",
    "port.create", "port.created", "port.status", "port.statuses", "port.drain", "port.connect", "port.prepare",
    "port.commit", "port.abort", "port.kill", "port.killed", "port.discover", "terms.claim", "terms.newest",
    "disk.write",
)  # fmt: skip
"""Functions that may raise once. `port.created` and `port.killed` raise when the work is done already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    at_s: float
    kind: Kind
    target: int = 0
    other: int = 0
    seconds: float = 0.0
    point: str = ""

    def __str__(self) -> str:
        more = f" {self.point}" if self.point else f" {self.target}"
        if self.kind is Kind.CUT_INGRESS:
            more += f"-{self.other}"
        return f"{self.at_s:6.2f} s  {self.kind.value}{more}" + (f" {self.seconds:+.2f} s" if self.seconds else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One world: its size, its traffic and its faults. All of it follows from the seed."""

    seed: int
    num_instances: int
    num_ingresses: int
    is_elastic: bool
    lengths: tuple[int, ...]  # of the answer of each request, in tokens
    arrivals_s: tuple[float | None, ...]  # None: that one never comes
    leave_s: tuple[float | None, ...]  # when the client of each request goes away; None: it waits for the end
    poison: tuple[int, ...]  # requests that kill each instance which computes their third token
    faults: tuple[Fault, ...]


def draw(seed: int) -> Scenario:
    """The scenario of `seed`."""
    rng = Random(seed)
    num_instances, num_ingresses = rng.choice((2, 3, 3, 4)), rng.choice((1, 1, 2))
    num_requests = rng.randint(4, 40)
    is_elastic = rng.random() < 0.5
    # Some seeds mix everything, others look at a few kinds closely.
    kinds = [*Kind, *_OFTEN] if rng.random() < 0.6 else rng.sample([*Kind, *_OFTEN], 3)
    size = num_instances, num_ingresses, num_requests
    faults = sorted((_fault(rng, rng.choice(kinds), size) for _ in range(rng.randint(1, 16))), key=lambda f: f.at_s)
    lengths = tuple(rng.randint(1, rng.choice((5, 40, 150, ENDLESS))) for _ in range(num_requests))
    arrivals_s = tuple(sorted(round(rng.uniform(0.0, STORM_S), 3) for _ in range(num_requests)))
    # No client waits for the longest answers: an instance that is not told of that would compute on.
    leave_s = tuple(
        round(rng.uniform(arrivals_s[i], HEALED_S), 3) if lengths[i] > LONG else None for i in range(num_requests)
    )
    poison = (rng.randrange(num_requests),) if rng.random() < POISON_SHARE else ()
    if poison and rng.random() < 0.5:
        faults = []
    return Scenario(
        seed=seed,
        num_instances=num_instances,
        num_ingresses=num_ingresses,
        is_elastic=is_elastic,
        lengths=lengths,
        arrivals_s=arrivals_s,
        leave_s=leave_s,
        poison=poison,
        faults=tuple(faults),
    )


def _fault(rng: Random, kind: Kind, size: tuple[int, int, int]) -> Fault:
    num_instances, num_ingresses, num_requests = size
    target, other, seconds, point = 0, 0, 0.0, ""
    match kind:
        case Kind.CRASH | Kind.ENGINE_FAILURE:
            target = rng.randrange(num_instances)
        case Kind.STOP | Kind.CUT_CONTROLLER:
            target, seconds = rng.randrange(num_instances), rng.choice((0.3, 2.0, 8.0, 15.0))
        case Kind.CUT_INGRESS:
            target, other, seconds = rng.randrange(num_ingresses), rng.randrange(num_instances), rng.uniform(0.2, 15.0)
        case Kind.CUT_SOURCE:
            target, seconds = rng.randrange(num_ingresses), rng.uniform(0.2, 15.0)
        case Kind.CONTROLLER_DEATH | Kind.SECOND_CONTROLLER | Kind.SLOW_RAY:
            seconds = rng.choice((0.0, 0.5, 3.0, 8.0))
        case Kind.INGRESS_DEATH:
            target, seconds = rng.randrange(num_ingresses), rng.uniform(0.0, 3.0)
        case Kind.CLOCK:
            seconds = rng.choice((-1.0, 1.0)) * rng.choice((0.5, 60.0, 86_400.0, 1e9))
        case Kind.EXCEPTION:
            point = rng.choice(POINTS)
        case Kind.FULL_DISK | Kind.SHORT_WRITES:
            target, seconds = rng.choice((1, 10, 100, 1000)), rng.uniform(0.5, 15.0)
        case Kind.TORN_LINE:
            target = rng.randint(1, 300)
        case Kind.LEAVE:
            target = rng.randrange(num_requests)
        case Kind.LAYOUT:
            target = rng.randrange(3)
    at_s = round(rng.uniform(CALM_S, STORM_S), 3)
    return Fault(at_s=at_s, kind=kind, target=target, other=other, seconds=round(seconds, 3), point=point)
