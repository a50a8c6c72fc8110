"""How a new controller takes over from the one before: from the living instances, helped by the event log."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pengserve.controller import state as transitions
from pengserve.controller.events import Change, open_starts
from pengserve.controller.ports import ReplicaPort
from pengserve.controller.slots import Slot, span
from pengserve.controller.state import Transition
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.snapshot import InstanceSnapshot, InstanceState

_VERSIONS_PER_S = 1000  # a controller changes its routes less often than this

_ERROR_OF = {
    EventKind.CONTROLLER_START: EventKind.CONTROLLER_STOP,
    EventKind.INSTANCE_START: EventKind.INSTANCE_ERROR,
    EventKind.INSTANCE_DRAIN_START: EventKind.INSTANCE_DRAIN_ERROR,
    EventKind.TRANSITION_START: EventKind.TRANSITION_ERROR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bases:
    """Numbers above all that earlier controllers of the application gave out."""

    version: int
    epoch: Epoch


def bases(wall_s: float, past: Iterable[Event]) -> Bases:
    """Starts both numbers from the wall clock; where a clock was set back, from the log.

    No instance knows them, and the log may be absent or on another node; the clock is the one witness that is always
    there.
    """
    version, epoch = int(wall_s * _VERSIONS_PER_S), int(wall_s)
    for event in past:
        version = max(version, int(event.data.get("version", 0)) + 1)
        epoch = max(epoch, int(event.data.get("epoch", 0)) + 1)
    return Bases(version=version, epoch=Epoch(epoch))


async def recover(config: ControllerConfig, port: ReplicaPort, base: Bases, now_s: float) -> Transition:
    """The state of the cluster as its instances tell it.

    Raises:
        Exception: that of `port.discover`. The state is unchanged, and the caller can try again.
    """
    found = await port.discover()
    answers = await asyncio.gather(*(_ask(port, key, config.status_timeout_s) for key in found.living))
    living: dict[InstanceKey, InstanceSnapshot | None] = {}
    leftovers = list(found.leftovers)
    for key, answer in zip(found.living, answers, strict=True):
        if isinstance(answer, EngineError):
            leftovers.append(key)
        else:
            living[key] = answer
    state = transitions.empty(config, version=base.version, epoch=base.epoch)
    return transitions.adopt(state, living, leftovers, found.newest, now_s)


def close_open_spans(past: Sequence[Event], slots: Iterable[Slot]) -> tuple[Change, ...]:
    """Ends for the starts that earlier controllers left open in the log; `slots` are as adopted.

    A start that is still going on stays open. The controller that adopts the instance begins its drain anew.
    """
    found = {span(slot.key): slot.state for slot in slots if slot.alive}
    changes = []
    for start in open_starts(past):
        state = found.get(start.span)
        if start.kind is not EventKind.INSTANCE_START or state is None:
            changes.append(Change(kind=_ERROR_OF[start.kind], span=start.span, why="its controller ended before it"))
        elif state is not InstanceState.STARTING:
            changes.append(Change(kind=EventKind.INSTANCE_READY, span=start.span, why="ready when adopted"))
    return tuple(changes)


async def _ask(port: ReplicaPort, key: InstanceKey, timeout_s: float) -> InstanceSnapshot | EngineError | None:
    """Its answer; the error where it is gone; None where it gives no answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await port.status(key)
    except EngineError as error:
        return error
    except TimeoutError:
        return None
