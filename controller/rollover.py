"""Instances of an earlier configuration of the application: they finish what their ingresses have, then they end.

They are never adopted and get no route here. A deployment of another model or other settings starts new ingresses; the
old ones keep to the old instances until Serve has taken them away. New instances start beside the old ones as far as
there is room for their reservations; the others wait until old ones have ended. Pure: no clock, no I/O, no tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pengserve.controller.events import EventDraft
from pengserve.controller.slots import DrainEnded, Gone, Observation, span
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.ids import InstanceKey

# For Serve to start the new ingresses and to take the old ones away; then their requests have the time of a drain.
HANDOVER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """One life of an earlier configuration. Times are of the controller's monotonic clock."""

    key: InstanceKey
    since_s: float
    deadline_s: float  # after which it is killed, also while it runs requests


def begun(
    keys: Sequence[InstanceKey], config: ControllerConfig, now_s: float, changes: list[EventDraft]
) -> tuple[Outgoing, ...]:
    """What a new controller found of earlier configurations."""
    deadline_s = now_s + HANDOVER_S + config.drain_timeout_s
    for key in keys:
        why = "the application has another configuration now"
        changes.append(EventDraft(kind=EventKind.INSTANCE_DRAIN_START, span=span(key), why=why))
    return tuple(Outgoing(key=key, since_s=now_s, deadline_s=deadline_s) for key in keys)


def take_in(life: Outgoing, seen: Observation, now_s: float, changes: list[EventDraft]) -> bool:
    """Whether `life` is over after what was learnt of it; the caller then kills it."""
    if isinstance(seen, DrainEnded) and seen.complete:
        data = {"drain_s": now_s - life.since_s}
        changes.append(EventDraft(kind=EventKind.INSTANCE_DRAIN_END, span=span(life.key), data=data))
    elif isinstance(seen, DrainEnded | Gone):
        why = "requests still ran" if isinstance(seen, DrainEnded) else seen.why
        changes.append(EventDraft(kind=EventKind.INSTANCE_DRAIN_ERROR, span=span(life.key), why=why))
    else:
        return False
    return True


def overdue(life: Outgoing, now_s: float, changes: list[EventDraft]) -> bool:
    """Whether the time of `life` is over."""
    if now_s <= life.deadline_s:
        return False
    changes.append(EventDraft(kind=EventKind.INSTANCE_DRAIN_ERROR, span=span(life.key), why="requests still ran"))
    return True
