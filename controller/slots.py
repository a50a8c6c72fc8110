"""One slot of the application and how one life in it begins, goes on and ends. Pure: no clock, no I/O, no tasks.

    vacant --create--> STARTING --answers READY--> READY --drain--> DRAINING
      ^                   |                          |                 |
      |   error, start    |           gone, silent,  |       drained,  |
      |   timeout, gone   v                   error  v   gone, timeout v
      +---killed--------DEAD (its key is doomed) <---+-----------------+

A slot is filled again only once all its earlier lives are known to have been killed: at most one life a slot. What ends
a life sets when the slot may be filled again: failures in a row double the wait up to a maximum, and a life that was
READY for longer than the wait before it ends the row.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from pengserve.controller.events import EventDraft
from pengserve.planners.types.codec import to_data
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.snapshot import DeviceInfo, InstanceSnapshot, InstanceState, face_of

# What can be learnt of one life ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gone:
    """It could not be created, or its process has ended."""

    why: str


@dataclass(frozen=True, slots=True)
class DrainEnded:
    """Its drain ended; `complete` where nothing ran any more."""

    complete: bool


@dataclass(frozen=True, slots=True)
class Killed:
    """It is ended and its resources are free."""


Observation = InstanceSnapshot | Gone | DrainEnded | Killed  # the first: its answer to a status call

_NOWHERE, _NEVER = DeviceInfo(), Epoch(0)

# The slot -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One slot of the application. Times are of the controller's monotonic clock.

    It stays the same object while its life answers the same but for its loads: who compares slots compares objects.
    """

    key: InstanceKey  # the newest life; incarnation 0 before the first
    state: InstanceState = InstanceState.DEAD
    snapshot: InstanceSnapshot | None = None  # the first of its newest answers that differ in their loads alone
    since_s: float = 0.0  # when it entered `state`
    deadline_s: float = 0.0  # of a drain
    failures: int = 0  # in a row
    retry_at_s: float = 0.0
    failure: str = ""  # how the life before ended; empty once the slot is READY again
    doomed: tuple[InstanceKey, ...] = ()  # lives to be killed before the slot is filled again
    device: DeviceInfo = _NOWHERE  # where its newest life is or was: an empty slot keeps its rank
    is_held: bool = False  # drained by an operator: it stays empty until it is undrained
    switched: Epoch = _NEVER  # that the newest switch led to which this life is known to have committed

    # What follows from these; a slot is read a thousand times for each time that it is made.
    alive: bool = field(init=False, compare=False)  # whether a life is in the slot, however far it has come
    # What it says of itself where it is READY, else None. Its loads may be older than its newest answer.
    ready: InstanceSnapshot | None = field(init=False, compare=False)
    # What it says it runs, "dp" or "tp2@(0,1)"; empty where it is not READY, or silent since its last switch.
    lane: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        ready = self.snapshot if self.state is InstanceState.READY else None
        object.__setattr__(self, "alive", self.state is not InstanceState.DEAD)
        object.__setattr__(self, "ready", ready)
        object.__setattr__(self, "lane", "" if ready is None or ready.epoch < self.switched else ready.lane)

    @property
    def answered(self) -> bool:
        """Whether the living instance has ever answered: before that it may still be waiting for its place."""
        return self.snapshot is not None


def begun(slot: Slot, key: InstanceKey, now_s: float) -> Slot:
    """A slot at the beginning of the life `key`."""
    return replace(
        slot,
        key=key,
        state=InstanceState.STARTING,
        snapshot=None,
        since_s=now_s,
        switched=_NEVER,
    )


def span(key: InstanceKey) -> str:
    """The span of a life in the event log."""
    return f"instance:{key}"


def take_in(
    slot: Slot, key: InstanceKey, seen: Observation, config: ControllerConfig, now_s: float, changes: list[EventDraft]
) -> Slot:
    """The slot after what was learnt of `key`, which may be a life that is over."""
    if isinstance(seen, Killed):
        return replace(slot, doomed=tuple(k for k in slot.doomed if k != key)) if key in slot.doomed else slot
    if key != slot.key or not slot.alive:
        return slot  # word of a life that is over
    if isinstance(seen, Gone):
        return _failed(slot, seen.why, config, now_s, changes, lost=True)
    if isinstance(seen, DrainEnded):
        if slot.state is not InstanceState.DRAINING:
            return slot
        if seen.complete:
            changes.append(
                EventDraft(kind=EventKind.INSTANCE_DRAIN_END, span=span(key), data={"drain_s": now_s - slot.since_s})
            )
        else:
            changes.append(EventDraft(kind=EventKind.INSTANCE_DRAIN_ERROR, span=span(key), why="requests still ran"))
        return ended(slot, _why_ended(slot), now_s)
    return _answered(slot, seen, config, now_s, changes)


def _answered(
    slot: Slot, answer: InstanceSnapshot, config: ControllerConfig, now_s: float, changes: list[EventDraft]
) -> Slot:
    if says_the_same(slot, answer):
        return slot
    if answer.state is InstanceState.DEAD:
        return _failed(slot, answer.failure or "its engine failed", config, now_s, changes, lost=False)
    changes += _placements(slot, answer)
    device = slot.device if slot.device == answer.device else answer.device
    slot = replace(slot, snapshot=answer, device=device)
    if answer.state is slot.state or slot.state is InstanceState.DRAINING:
        return slot
    if slot.state is InstanceState.STARTING:
        data = {"start_s": round(now_s - slot.since_s, 3), **_placed(answer)}
        changes.append(EventDraft(kind=EventKind.INSTANCE_READY, span=span(slot.key), data=data))
        slot = replace(slot, state=InstanceState.READY, since_s=now_s, failure="")
    if answer.state is InstanceState.DRAINING:
        slot = draining(slot, "it was asked to", now_s + config.drain_timeout_s, now_s, changes)
    return slot


def _placements(slot: Slot, answer: InstanceSnapshot) -> list[EventDraft]:
    """Changes of where KV is that the slot's life has told of since it was asked last."""
    if slot.snapshot is None:
        return []  # a controller before this one has told of them
    after = slot.snapshot.placements[-1].number if slot.snapshot.placements else 0
    return [
        EventDraft(kind=EventKind.PLACEMENT_CHANGED, span=span(slot.key), why=note.why, data=to_data(note))
        for note in answer.placements
        if note.number > after
    ]


def says_the_same(slot: Slot, answer: InstanceSnapshot) -> bool:
    """Whether an answer of the slot's life differs from those before in its loads alone: the slot stays as it is."""
    known = slot.snapshot
    if known is None:
        return False
    return bool(answer.revision == known.revision if answer.revision else face_of(answer) == face_of(known))


def overdue(slot: Slot, seen_s: float, config: ControllerConfig, now_s: float, changes: list[EventDraft]) -> Slot:
    """Ends a life that has been silent, starting or draining for too long; `seen_s` is when it last answered."""
    if slot.state is InstanceState.STARTING:
        # A process that imports and loads may be deaf for a while; only the whole start has a time-out.
        if now_s - slot.since_s > config.start_timeout_s:
            where = "while it loaded" if slot.answered else f"waiting for resources ({_resources(config)})"
            why = f"not ready after {config.start_timeout_s:g} s, {where}"
            return _failed(slot, why, config, now_s, changes, lost=False)
    elif slot.alive and now_s - seen_s > config.lost_after_s:
        return _failed(slot, f"silent for {config.lost_after_s:g} s", config, now_s, changes, lost=True)
    elif slot.state is InstanceState.DRAINING and now_s > slot.deadline_s:
        changes.append(EventDraft(kind=EventKind.INSTANCE_DRAIN_ERROR, span=span(slot.key), why="requests still ran"))
        return ended(slot, _why_ended(slot), now_s)
    return slot


def _failed(
    slot: Slot, why: str, config: ControllerConfig, now_s: float, changes: list[EventDraft], *, lost: bool
) -> Slot:
    """Ends a life by a failure; every span that is open for it is closed."""
    if slot.state is InstanceState.DRAINING or slot.is_held:
        changes.append(EventDraft(kind=EventKind.INSTANCE_DRAIN_ERROR, span=span(slot.key), why=why))
    failures = slot.failures
    if slot.state is not InstanceState.STARTING and now_s - slot.since_s >= backoff_s(config, failures):
        failures = 0
    failures += 1
    delay_s = backoff_s(config, failures)
    was_starting = slot.state is InstanceState.STARTING
    kind = EventKind.INSTANCE_LOST if lost and not was_starting else EventKind.INSTANCE_ERROR
    data = {"state": slot.state.value, "failures_in_a_row": failures, "retry_in_s": delay_s}
    changes.append(EventDraft(kind=kind, span=span(slot.key), why=why, data=data))
    return replace(ended(slot, why, now_s), failures=failures, retry_at_s=now_s + delay_s)


def backoff_s(config: ControllerConfig, failures: int) -> float:
    """How long a slot stays empty after so many failures in a row."""
    if failures == 0:
        return 0.0
    # 2**30 back-offs are longer than any maximum; a float would overflow at 2**1024.
    return min(config.restart_backoff_max_s, config.restart_backoff_s * 2.0 ** min(failures - 1, 30))


def ended(slot: Slot, why: str, now_s: float) -> Slot:
    """Ends a life without a failure; the caller has closed its spans."""
    return replace(
        slot,
        state=InstanceState.DEAD,
        snapshot=None,
        since_s=now_s,
        failure=why,
        failures=0,
        retry_at_s=now_s,
        doomed=(*slot.doomed, slot.key),
    )


def _why_ended(slot: Slot) -> str:
    """What people read of a slot whose life has been drained."""
    return f"drained; `pengserve undrain {slot.key.instance_id}` starts it again" if slot.is_held else "drained"


def draining(slot: Slot, why: str, deadline_s: float, now_s: float, changes: list[EventDraft]) -> Slot:
    """Begins a drain."""
    changes.append(EventDraft(kind=EventKind.INSTANCE_DRAIN_START, span=span(slot.key), why=why))
    return replace(slot, state=InstanceState.DRAINING, since_s=now_s, deadline_s=deadline_s)


def adopted(
    slot: Slot, answer: InstanceSnapshot | None, config: ControllerConfig, now_s: float, changes: list[EventDraft]
) -> Slot:
    """Takes over a life that an earlier controller began; `answer` is None where it gave none yet."""
    slot = replace(slot, state=InstanceState.STARTING, since_s=now_s)
    found = answer.state if answer else InstanceState.STARTING
    data: dict[str, Any] = {"state": found.value, **(_placed(answer) if answer else {})}
    changes.append(EventDraft(kind=EventKind.INSTANCE_ADOPTED, span=span(slot.key), data=data))
    if answer is not None:
        slot = replace(slot, device=answer.device)
    if answer is None or answer.state is InstanceState.STARTING:
        return replace(slot, snapshot=answer)
    if answer.state is not InstanceState.DEAD:
        slot = replace(slot, state=InstanceState.READY)
    return _answered(slot, answer, config, now_s, changes)


def _placed(answer: InstanceSnapshot) -> dict[str, Any]:
    capacity = answer.capacity
    return {
        "endpoint": answer.endpoint,
        "node_id": answer.device.node_id,
        "device": answer.device.device,
        "pid": answer.device.pid,
        "num_blocks": capacity.num_blocks if capacity else 0,
    }


def shown(slot: Slot, answer: InstanceSnapshot | None) -> InstanceSnapshot:
    """The slot as planners and people see it; `answer` is the newest of its life, if there is one."""
    if slot.snapshot is None or answer is None:
        return InstanceSnapshot(key=slot.key, state=slot.state, failure=slot.failure)
    if answer.state is slot.state and not slot.failure:
        return answer
    return replace(answer, state=slot.state, failure=slot.failure)


def _resources(config: ControllerConfig) -> str:
    return f"{config.cpus_per_instance:g} CPU, {config.gpus_per_instance:g} GPU"
