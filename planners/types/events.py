"""What happened, as dashboards, replay and tests read it. Every `_start` gets its `_end` or `_error`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class EventKind(StrEnum):
    """All kinds of events. A kind is a past fact; progress of one thing shares a `span`."""

    CONTROLLER_START = "controller_start"
    CONTROLLER_RECOVERED = "controller_recovered"
    CONTROLLER_STOP = "controller_stop"
    INSTANCE_START = "instance_start"
    INSTANCE_READY = "instance_ready"
    INSTANCE_ERROR = "instance_error"
    INSTANCE_LOST = "instance_lost"
    INSTANCE_ADOPTED = "instance_adopted"
    INSTANCE_DRAIN_START = "instance_drain_start"
    INSTANCE_DRAIN_END = "instance_drain_end"
    INSTANCE_DRAIN_ERROR = "instance_drain_error"
    INSTANCE_UNDRAINED = "instance_undrained"  # a drained slot may be filled again
    ROUTING_CHANGED = "routing_changed"
    LAYOUT_CHANGED = "layout_changed"
    POLICY_CHANGED = "policy_changed"  # who decides about the layout
    PLAN_DECIDED = "plan_decided"  # what the arbiter of the layout chose, and what else was possible
    PLAN_OUTCOME = "plan_outcome"  # what was predicted of a layout, and what became of it within the horizon
    PLACEMENT_CHANGED = "placement_changed"  # a search has changed which layers are on the host, or who is paused
    TRANSITION_START = "transition_start"
    TRANSITION_END = "transition_end"
    TRANSITION_ERROR = "transition_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the event log."""

    seq: int  # grows by one, over controller restarts too
    time_s: float  # seconds since the Unix epoch
    kind: EventKind
    why: str = ""  # one sentence for people
    span: str = ""  # ties a start to its end, e.g. "instance:1.3"
    data: Mapping[str, Any] = field(default_factory=dict)  # JSON values
