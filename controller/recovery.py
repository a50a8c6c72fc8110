"""How a new controller takes over from the one before: from the living instances, helped by the event log."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pengserve.controller import drains
from pengserve.controller import state as transitions
from pengserve.controller.events import EventDraft, open_starts
from pengserve.controller.ports import ReplicaPort
from pengserve.controller.slots import Slot, span
from pengserve.controller.state import Transition
from pengserve.controller.terms import Term
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import Epoch, InstanceKey, Version
from pengserve.planners.types.snapshot import InstanceSnapshot, InstanceState

_EPOCHS_PER_TERM = 10**9  # a controller changes its layout less often than this

_ERROR_OF = {
    EventKind.CONTROLLER_START: EventKind.CONTROLLER_STOP,
    EventKind.INSTANCE_START: EventKind.INSTANCE_ERROR,
    EventKind.INSTANCE_DRAIN_START: EventKind.INSTANCE_DRAIN_ERROR,
    EventKind.TRANSITION_START: EventKind.TRANSITION_ERROR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bases:
    """Numbers above all that earlier controllers of the application gave out."""

    version: Version
    epoch: Epoch


def bases(term: int, past: Iterable[Event]) -> Bases:
    """Where a controller of `term` begins to count. No clock: one may be set back between two controllers.

    Layouts have plain numbers, because instances count them on. Each term has a range of its own, and the log tells
    where an earlier release has counted further.
    """
    newest = max((_number(event, "epoch") for event in past), default=0)
    return Bases(version=Version(term=term, counter=0), epoch=Epoch(max(term * _EPOCHS_PER_TERM, newest + 1)))


async def recover(
    config: ControllerConfig, port: ReplicaPort, term: Term, past: Sequence[Event], now_s: float
) -> Transition:
    """The state of the cluster as its instances tell it. Takes a term, unless the controller has one that counts.

    The term comes first: what an earlier controller orders after that is refused.

    Raises:
        Exception: that of the store of terms, or of `port.discover`. The caller can try again.
    """
    if not term.number:
        await term.take(above=_newest_term(past))
    found = await port.discover()
    answers = await asyncio.gather(*(_ask(port, key, config.status_timeout_s) for key in found.living))
    living: dict[InstanceKey, InstanceSnapshot | None] = {}
    leftovers = list(found.leftovers)
    for key, answer in zip(found.living, answers, strict=True):
        if isinstance(answer, EngineError):
            leftovers.append(key)
        else:
            living[key] = answer
    reported = max((answer.term for answer in living.values() if answer is not None), default=0)
    await term.face(reported)
    base = bases(term.number, past)
    state = transitions.empty(config, version=base.version, epoch=base.epoch)
    adopted = transitions.adopt(state, living, leftovers, found.newest, now_s, found.outgoing)
    return drains.remember(adopted, past, config.drain_timeout_s, now_s)


def close_open_spans(past: Sequence[Event], slots: Iterable[Slot]) -> tuple[EventDraft, ...]:
    """Ends for the starts that earlier controllers left open in the log; `slots` are as adopted.

    A start that is still going on stays open. The controller that adopts the instance begins its drain anew.
    """
    found = {span(slot.key): slot.state for slot in slots if slot.alive}
    changes = []
    for start in open_starts(past):
        state = found.get(start.span)
        if start.kind is not EventKind.INSTANCE_START or state is None:
            changes.append(
                EventDraft(kind=_ERROR_OF[start.kind], span=start.span, why="its controller ended before it")
            )
        elif state is not InstanceState.STARTING:
            changes.append(EventDraft(kind=EventKind.INSTANCE_READY, span=start.span, why="ready when adopted"))
    return tuple(changes)


def _newest_term(past: Iterable[Event]) -> int:
    """The highest term in the log; 0 where it names none."""
    return max((_number(event, "term") for event in past), default=0)


def _number(event: Event, name: str) -> int:
    """That number of an event's data; 0 where a damaged line holds none."""
    value = event.data.get(name)
    return value if isinstance(value, int) else 0


async def _ask(port: ReplicaPort, key: InstanceKey, timeout_s: float) -> InstanceSnapshot | EngineError | None:
    """Its answer; the error where it is gone; None where it gives no answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await port.status(key)
    except EngineError as error:
        return error
    except TimeoutError:
        return None
