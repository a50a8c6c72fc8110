"""The drain of one instance: its route goes, its requests move, its process ends, and its slot stays empty. Pure.

    READY --begin--> DRAINING, held --nothing runs--> DEAD, held --undrain--> vacant, and filled again

A slot that is held is not filled. A controller that takes over reads from the event log which slots are held; where it
has no log, it fills them again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pengserve.controller import state as transitions
from pengserve.controller.events import EventDraft
from pengserve.controller.slots import Slot, span
from pengserve.controller.state import ClusterState, Transition
from pengserve.planners.columns import group_table
from pengserve.planners.migrate import plan_evacuation
from pengserve.planners.types.drains import DrainOperation, DrainPhase
from pengserve.planners.types.errors import PlanError
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.snapshot import InstanceSnapshot, InstanceState

LEAVE_S = 10.0  # after the time-out of a drain: what cannot move is sent again elsewhere, from its tokens


def begin(state: ClusterState, instance_id: int, timeout_s: float, now_s: float) -> Transition:
    """Takes an instance's route away and lets its requests move. One that is drained already is left alone.

    Raises:
        PlanError: there is no such instance, or it cannot be drained now; says why.
    """
    slot = _slot(state, instance_id)
    if slot.is_held:
        return Transition(state=state)
    _require_drainable(state, slot)
    return _drained(state, slot, "an operator asked for it", timeout_s, now_s)


def _require_drainable(state: ClusterState, slot: Slot) -> None:
    key, others = slot.key, [other for other in state.slots if other is not slot and other.ready is not None]
    if state.closing:
        raise PlanError("the whole application is being drained; wait for its end")
    if slot.ready is None:
        raise PlanError(f"instance {key} is {slot.state.value}; only an instance that is ready can be drained")
    if not others:
        raise PlanError(f"instance {key} is the only one that serves; drain the application with `pengserve down`")
    if key.instance_id in state.busy_members:
        raise PlanError(f"instance {key} is changing its shape; try again in a moment")
    group = group_table(state.layout.groups).group_of.get(key.instance_id)
    if group is not None and group.degree > 1:
        raise PlanError(f"instance {key} serves in {group}; use `pengserve layout set dp` first")


def _drained(state: ClusterState, slot: Slot, why: str, timeout_s: float, now_s: float) -> Transition:
    data = {"instance_id": slot.key.instance_id, "operation": _operation_id(slot), "timeout_s": timeout_s}
    change = EventDraft(kind=EventKind.INSTANCE_DRAIN_START, span=span(slot.key), why=why, data=data)
    deadline_s = now_s + timeout_s + LEAVE_S
    held = replace(slot, state=InstanceState.DRAINING, since_s=now_s, deadline_s=deadline_s, is_held=True)
    return transitions.with_slot(state, held, [change], now_s)


def undo(state: ClusterState, instance_id: int, now_s: float) -> Transition:
    """Lets a drained slot be filled again.

    Raises:
        PlanError: there is no such instance, it is not drained, or its drain is not over.
    """
    slot = _slot(state, instance_id)
    if not slot.is_held:
        raise PlanError(f"instance {slot.key} is not drained")
    if slot.alive:
        raise PlanError(f"instance {slot.key} still drains; undrain it once it is safe to delete")
    change = EventDraft(kind=EventKind.INSTANCE_UNDRAINED, span=span(slot.key), data={"instance_id": instance_id})
    return transitions.with_slot(state, replace(slot, is_held=False, retry_at_s=now_s), [change], now_s)


def operation(state: ClusterState, instance_id: int) -> DrainOperation:
    """The drain of an instance as it is now.

    Raises:
        PlanError: there is no such instance, or it is not drained.
    """
    slot = _slot(state, instance_id)
    if not slot.is_held:
        raise PlanError(f"instance {slot.key} is not drained")
    phase = DrainPhase.MOVING if slot.alive else DrainPhase.ENDING if slot.doomed else DrainPhase.DONE
    answer = state.answers[instance_id] if slot.alive else None
    is_done = phase is DrainPhase.DONE
    return DrainOperation(
        id=_operation_id(slot), key=slot.key, phase=phase, num_left=_num_left(answer), safe_to_delete=is_done
    )


def orders(state: ClusterState, name: str, now_s: float) -> dict[InstanceId, tuple[Migrate, ...]]:
    """What instances that are drained, or leave, are told to do with their requests. Ids begin with `name`."""
    found: dict[InstanceId, tuple[Migrate, ...]] = {}
    if state.closing:
        return found
    for slot in [slot for slot in state.slots if slot.state is InstanceState.DRAINING]:
        answer = state.answers[slot.key.instance_id]
        if answer is not None and _num_left(answer):
            must_leave = now_s >= slot.deadline_s - LEAVE_S
            found[slot.key.instance_id] = plan_evacuation(answer, alone(state), name=name, must_leave=must_leave)
    return found


def alone(state: ClusterState) -> Sequence[InstanceSnapshot]:
    """Instances that serve alone, and are in no switch: requests can move to them with their KV."""
    group_of = group_table(state.layout.groups).group_of
    busy = state.busy_members
    found = []
    for slot, answer in zip(state.slots, state.answers, strict=True):
        group = group_of.get(slot.key.instance_id)
        is_alone = group is None or group.degree == 1
        if slot.ready is not None and answer is not None and is_alone and slot.key.instance_id not in busy:
            found.append(answer)
    return found


def remember(found: Transition, past: Iterable[Event], timeout_s: float, now_s: float) -> Transition:
    """Holds the slots that an earlier controller was asked to drain, and goes on with what is not over."""
    held: dict[int, bool] = {}
    for event in past:
        instance_id = event.data.get("instance_id")
        if isinstance(instance_id, int) and instance_id < len(found.state.slots):
            if event.kind is EventKind.INSTANCE_UNDRAINED:
                held[instance_id] = False
            elif event.kind is EventKind.INSTANCE_DRAIN_START and "operation" in event.data:
                held[instance_id] = True
    for instance_id in (instance_id for instance_id, is_held in held.items() if is_held):
        slot = found.state.slots[instance_id]
        if slot.ready is not None:
            after = _drained(found.state, slot, "an earlier controller was asked for it", timeout_s, now_s)
        else:
            after = transitions.with_slot(found.state, replace(slot, is_held=True), [], now_s)
        found = Transition(state=after.state, changes=(*found.changes, *after.changes))
    return found


def _slot(state: ClusterState, instance_id: int) -> Slot:
    if not 0 <= instance_id < len(state.slots):
        raise PlanError(f"there is no instance {instance_id}: choose among 0 to {len(state.slots) - 1}")
    return state.slots[instance_id]


def _operation_id(slot: Slot) -> str:
    return f"drain-{slot.key}"


def _num_left(answer: InstanceSnapshot | None) -> int:
    return 0 if answer is None else answer.stats.num_running + answer.stats.num_waiting + answer.stats.num_paused
