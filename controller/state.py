"""The cluster's state and its transitions. Pure: no clock, no I/O, no tasks.

    vacant --create--> STARTING --answers READY--> READY --drain--> DRAINING
      ^                   |                          |                 |
      |   error, start    |           gone, silent,  |       drained,  |
      |   timeout, gone   v                   error  v   gone, timeout v
      +---killed--------DEAD (its key is doomed) <---+-----------------+

A slot is filled again only once all its earlier lives are known to have been killed: at most one life a slot. What ends
a life sets when the slot may be filled again: failures in a row double the wait up to a maximum, and a life that was
READY for longer than the wait before it ends the row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pengserve.controller.events import Change
from pengserve.planners.ranks import rank_order
from pengserve.planners.replace import Vacancy, plan_replacements
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.layout import Group, Layout
from pengserve.planners.types.plans import ReplacePlan
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot, InstanceState, Route, RoutingTable

# What can be learnt of one life ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """It answered a status call."""

    snapshot: InstanceSnapshot


@dataclass(frozen=True, slots=True)
class Gone:
    """It could not be created, or its process has ended."""

    why: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Its drain ended; `complete` where nothing ran any more."""

    complete: bool


@dataclass(frozen=True, slots=True)
class Killed:
    """It is ended and its resources are free."""


Observation = Answered | Gone | Drained | Killed

# The state ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One slot of the application. Times are of the controller's monotonic clock."""

    key: InstanceKey  # the newest life; incarnation 0 before the first
    state: InstanceState = InstanceState.DEAD
    snapshot: InstanceSnapshot | None = None  # its newest answer
    since_s: float = 0.0  # when it entered `state`
    seen_s: float = 0.0  # its newest answer, or when it was created
    deadline_s: float = 0.0  # of a drain
    failures: int = 0  # in a row
    retry_at_s: float = 0.0
    failure: str = ""  # how the life before ended; empty once the slot is READY again
    doomed: tuple[InstanceKey, ...] = ()  # lives to be killed before the slot is filled again

    @property
    def alive(self) -> bool:
        """Whether a life is in the slot, however far it has come."""
        return self.state is not InstanceState.DEAD

    @property
    def answered(self) -> bool:
        """Whether the living instance has ever answered: before that it may still be waiting for its place."""
        return self.snapshot is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """All that the controller knows. Transitions return a new one."""

    config: ControllerConfig
    slots: tuple[Slot, ...]  # slot i is instance id i
    layout: Layout
    routing: RoutingTable
    strays: tuple[InstanceKey, ...] = ()  # lives outside the slots, to be killed
    closing: bool = False  # the application ends: nothing is filled again


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A new state and what happened on the way there."""

    state: ClusterState
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What the state calls for. Doing a thing again that is being done is harmless."""

    kills: tuple[InstanceKey, ...] = ()
    drains: tuple[InstanceKey, ...] = ()
    replace: ReplacePlan | None = None


def span(key: InstanceKey) -> str:
    """The span of a life in the event log."""
    return f"instance:{key}"


def empty(config: ControllerConfig, *, version: int, epoch: Epoch) -> ClusterState:
    """No instance yet. `version` and `epoch` are above all that earlier controllers gave out."""
    slots = tuple(Slot(key=InstanceKey(instance_id=InstanceId(i), incarnation=0)) for i in range(config.num_instances))
    return ClusterState(
        config=config,
        slots=slots,
        layout=Layout.all_dp(tuple(s.key.instance_id for s in slots), epoch),
        routing=RoutingTable(version=version, epoch=epoch, routes=()),
    )


# Transitions ----------------------------------------------------------------------------------------------------------


def observe(state: ClusterState, seen: Sequence[tuple[InstanceKey, Observation]], now_s: float) -> Transition:
    """Takes in what was learnt, and what silence since then means."""
    changes: list[Change] = []
    by_slot: dict[int, list[tuple[InstanceKey, Observation]]] = {}
    strays = state.strays
    for key, observation in seen:
        if isinstance(observation, Killed) and key in strays:
            strays = tuple(k for k in strays if k != key)
        by_slot.setdefault(key.instance_id, []).append((key, observation))
    slots: list[Slot] = []
    for slot in state.slots:
        for key, observation in by_slot.get(slot.key.instance_id, ()):
            slot = _take_in(slot, key, observation, state.config, now_s, changes)
        slots.append(_overdue(slot, state.config, now_s, changes))
    return _rerouted(replace(state, slots=tuple(slots), strays=strays), state, changes)


def create(state: ClusterState, slots: Iterable[InstanceId], why: str, now_s: float) -> Transition:
    """Begins a new life in each of the empty `slots`; the caller creates the instances."""
    changes: list[Change] = []
    filled = list(state.slots)
    for instance_id in slots:
        slot = filled[instance_id]
        assert not slot.alive and not slot.doomed, f"slot {instance_id} is not vacant"
        key = InstanceKey(instance_id=instance_id, incarnation=slot.key.incarnation + 1)
        filled[instance_id] = replace(
            slot, key=key, state=InstanceState.STARTING, snapshot=None, since_s=now_s, seen_s=now_s
        )
        data = {"failures_in_a_row": slot.failures}
        changes.append(Change(kind=EventKind.INSTANCE_START, span=span(key), why=slot.failure or why, data=data))
    return Transition(state=replace(state, slots=tuple(filled)), changes=tuple(changes))


def adopt(
    state: ClusterState,
    living: Mapping[InstanceKey, InstanceSnapshot | None],
    leftovers: Sequence[InstanceKey],
    newest: Sequence[InstanceKey],
    now_s: float,
) -> Transition:
    """Rebuilds an empty state from what an earlier controller left.

    The highest incarnation in a slot wins, the others are killed, as is what is outside the slots. `living` maps to
    None where an instance gave no answer yet: it counts as STARTING. Incarnations go on above `newest`, so that no
    ingress takes a new life for one that it saw die.
    """
    lives: dict[InstanceId, list[InstanceKey]] = {}
    for key in {*living, *leftovers}:
        lives.setdefault(key.instance_id, []).append(key)
    last = {key.instance_id: key for key in sorted(newest)}
    changes: list[Change] = []
    slots = []
    for slot in state.slots:
        slot = replace(slot, key=last.get(slot.key.instance_id, slot.key))
        keys = sorted(lives.pop(slot.key.instance_id, []), reverse=True)
        if keys:
            # Only the newest life may be taken over: where that is a leftover, an older one has lost the slot.
            top = keys[0]
            taken = top in living
            slot = replace(slot, key=top, doomed=tuple(keys[1:] if taken else keys), failure="")
            if taken:
                slot = _adopted(slot, living[top], state.config, now_s, changes)
        slots.append(slot)
    strays = tuple(sorted(key for keys in lives.values() for key in keys))
    return _rerouted(replace(state, slots=tuple(slots), strays=strays), state, changes)


def drain_all(state: ClusterState, why: str, timeout_s: float, now_s: float) -> Transition:
    """Ends the application: no route any more, READY instances finish what they run, the others end at once."""
    changes: list[Change] = []
    slots = []
    for slot in state.slots:
        if slot.state is InstanceState.READY:
            slot = _draining(slot, why, now_s + timeout_s, now_s, changes)
        elif slot.state is InstanceState.STARTING:
            changes.append(Change(kind=EventKind.INSTANCE_ERROR, span=span(slot.key), why=f"not ready yet when {why}"))
            slot = _ended(slot, why, now_s)
        slots.append(slot)
    return _rerouted(replace(state, slots=tuple(slots), closing=True), state, changes)


def plan(state: ClusterState, now_s: float) -> Actions:
    """What the state calls for now."""
    kills, drains, vacancies = list(state.strays), [], []
    for slot in state.slots:
        kills.extend(slot.doomed)
        if slot.state is InstanceState.DRAINING:
            drains.append(slot.key)
        elif not slot.alive and not slot.doomed:
            vacancies.append(Vacancy(last_key=slot.key, retry_at_s=slot.retry_at_s, why=slot.failure))
    return Actions(
        kills=tuple(kills),
        drains=tuple(drains),
        replace=None if state.closing else plan_replacements(vacancies, epoch=state.layout.epoch, now_s=now_s),
    )


def snapshot(state: ClusterState, *, time_s: float, started_s: float) -> ClusterSnapshot:
    """What planners, the CLI and the dashboards see. A slot that is not READY shows how its last life ended."""
    instances = tuple(_shown(slot) for slot in state.slots)
    return ClusterSnapshot(
        app=state.config.app,
        time_s=time_s,
        layout=state.layout,
        instances=instances,
        routing_version=state.routing.version,
        controller_started_s=started_s,
        ranks=rank_order(instances),
    )


# One slot -------------------------------------------------------------------------------------------------------------


def _take_in(
    slot: Slot, key: InstanceKey, seen: Observation, config: ControllerConfig, now_s: float, changes: list[Change]
) -> Slot:
    if isinstance(seen, Killed):
        return replace(slot, doomed=tuple(k for k in slot.doomed if k != key)) if key in slot.doomed else slot
    if key != slot.key or not slot.alive:
        return slot  # word of a life that is over
    if isinstance(seen, Gone):
        return _failed(slot, seen.why, config, now_s, changes, lost=True)
    if isinstance(seen, Drained):
        if slot.state is not InstanceState.DRAINING:
            return slot
        if seen.complete:
            changes.append(
                Change(kind=EventKind.INSTANCE_DRAIN_END, span=span(key), data={"drain_s": now_s - slot.since_s})
            )
        else:
            changes.append(Change(kind=EventKind.INSTANCE_DRAIN_ERROR, span=span(key), why="requests still ran"))
        return _ended(slot, "drained", now_s)
    return _answered(slot, seen.snapshot, config, now_s, changes)


def _answered(
    slot: Slot, answer: InstanceSnapshot, config: ControllerConfig, now_s: float, changes: list[Change]
) -> Slot:
    if answer.state is InstanceState.DEAD:
        return _failed(slot, answer.failure or "its engine failed", config, now_s, changes, lost=False)
    slot = replace(slot, snapshot=answer, seen_s=now_s)
    if answer.state is slot.state or slot.state is InstanceState.DRAINING:
        return slot
    if slot.state is InstanceState.STARTING:
        data = {"start_s": round(now_s - slot.since_s, 3), **_placed(answer)}
        changes.append(Change(kind=EventKind.INSTANCE_READY, span=span(slot.key), data=data))
        slot = replace(slot, state=InstanceState.READY, since_s=now_s, failure="")
    if answer.state is InstanceState.DRAINING:
        slot = _draining(slot, "it was asked to", now_s + config.drain_timeout_s, now_s, changes)
    return slot


def _overdue(slot: Slot, config: ControllerConfig, now_s: float, changes: list[Change]) -> Slot:
    """Ends a life that has been silent, starting or draining for too long."""
    if slot.state is InstanceState.STARTING:
        # A process that imports and loads may be deaf for a while; only the whole start has a time-out.
        if now_s - slot.since_s > config.start_timeout_s:
            where = "while it loaded" if slot.answered else f"waiting for resources ({_resources(config)})"
            why = f"not ready after {config.start_timeout_s:g} s, {where}"
            return _failed(slot, why, config, now_s, changes, lost=False)
    elif slot.alive and now_s - slot.seen_s > config.lost_after_s:
        return _failed(slot, f"silent for {config.lost_after_s:g} s", config, now_s, changes, lost=True)
    elif slot.state is InstanceState.DRAINING and now_s > slot.deadline_s:
        changes.append(Change(kind=EventKind.INSTANCE_DRAIN_ERROR, span=span(slot.key), why="requests still ran"))
        return _ended(slot, "drained", now_s)
    return slot


def _failed(slot: Slot, why: str, config: ControllerConfig, now_s: float, changes: list[Change], *, lost: bool) -> Slot:
    """Ends a life by a failure; every span that is open for it is closed."""
    if slot.state is InstanceState.DRAINING:
        changes.append(Change(kind=EventKind.INSTANCE_DRAIN_ERROR, span=span(slot.key), why=why))
    failures = slot.failures
    if slot.state is not InstanceState.STARTING and now_s - slot.since_s >= backoff_s(config, failures):
        failures = 0
    failures += 1
    delay_s = backoff_s(config, failures)
    was_starting = slot.state is InstanceState.STARTING
    kind = EventKind.INSTANCE_LOST if lost and not was_starting else EventKind.INSTANCE_ERROR
    data = {"state": slot.state.value, "failures_in_a_row": failures, "retry_in_s": delay_s}
    changes.append(Change(kind=kind, span=span(slot.key), why=why, data=data))
    return replace(_ended(slot, why, now_s), failures=failures, retry_at_s=now_s + delay_s)


def backoff_s(config: ControllerConfig, failures: int) -> float:
    """How long a slot stays empty after so many failures in a row."""
    if failures == 0:
        return 0.0
    # 2**30 back-offs are longer than any maximum; a float would overflow at 2**1024.
    return min(config.restart_backoff_max_s, config.restart_backoff_s * 2.0 ** min(failures - 1, 30))


def _ended(slot: Slot, why: str, now_s: float) -> Slot:
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


def _draining(slot: Slot, why: str, deadline_s: float, now_s: float, changes: list[Change]) -> Slot:
    changes.append(Change(kind=EventKind.INSTANCE_DRAIN_START, span=span(slot.key), why=why))
    return replace(slot, state=InstanceState.DRAINING, since_s=now_s, deadline_s=deadline_s)


def _adopted(
    slot: Slot, answer: InstanceSnapshot | None, config: ControllerConfig, now_s: float, changes: list[Change]
) -> Slot:
    slot = replace(slot, state=InstanceState.STARTING, since_s=now_s, seen_s=now_s)
    found = answer.state if answer else InstanceState.STARTING
    data: dict[str, Any] = {"state": found.value, **(_placed(answer) if answer else {})}
    changes.append(Change(kind=EventKind.INSTANCE_ADOPTED, span=span(slot.key), data=data))
    if answer is None or answer.state is InstanceState.STARTING:
        return replace(slot, snapshot=answer)
    if answer.state is InstanceState.DEAD:
        return _answered(slot, answer, config, now_s, changes)
    slot = replace(slot, snapshot=answer, state=InstanceState.READY)
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


def _shown(slot: Slot) -> InstanceSnapshot:
    if slot.snapshot is None:
        return InstanceSnapshot(key=slot.key, state=slot.state, failure=slot.failure)
    if slot.snapshot.state is slot.state and not slot.failure:
        return slot.snapshot
    return replace(slot.snapshot, state=slot.state, failure=slot.failure)


def _resources(config: ControllerConfig) -> str:
    return f"{config.cpus_per_instance:g} CPU, {config.gpus_per_instance:g} GPU"


# Routes ---------------------------------------------------------------------------------------------------------------


def _rerouted(state: ClusterState, before: ClusterState, changes: list[Change]) -> Transition:
    """The state; with a new routing table where the part of a slot has changed, or where the application ends."""
    same_slots = all(_address(new) == _address(old) for new, old in zip(state.slots, before.slots, strict=True))
    if same_slots and state.closing == before.closing:
        return Transition(state=state, changes=tuple(changes))
    addresses = {slot.key.instance_id: address for slot in state.slots if (address := _address(slot))}
    routes = tuple(
        _route(group, *addresses[group.leader])
        for group in state.layout.groups
        if all(member in addresses for member in group.members)
    )
    table = RoutingTable(
        version=before.routing.version + 1, epoch=state.layout.epoch, routes=routes, is_draining=state.closing
    )
    data = {"version": table.version, "epoch": table.epoch, "routes": [str(r.key) for r in routes]}
    changes.append(Change(kind=EventKind.ROUTING_CHANGED, data=data))
    return Transition(state=replace(state, routing=table), changes=tuple(changes))


def _address(slot: Slot) -> tuple[InstanceKey, str] | None:
    """Where a slot takes requests: only READY ones do."""
    if slot.state is not InstanceState.READY or slot.snapshot is None or not slot.snapshot.endpoint:
        return None
    return slot.key, slot.snapshot.endpoint


def _route(group: Group, key: InstanceKey, endpoint: str) -> Route:
    return Route(key=key, endpoint=endpoint, members=group.members, shape=group.shape)
