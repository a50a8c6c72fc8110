"""The drain of one instance: its route goes, its requests move, its process ends, and its slot stays empty. Pure.

    READY --begin--> DRAINING, held --nothing runs--> DEAD, held --undrain--> vacant, and filled again
    READY, in a group --begin--> READY, held --its group has ended--> DRAINING, held

A member of a group serves on until the group has ended: the next switch dissolves it, and running requests go along
with their KV. That is the one way in which all of them keep it, those of the other members too. What waits for so long
that the time is over (a request that no instance alone holds) is resumed from its tokens.

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
    return _held(state, slot, "an operator asked for it", timeout_s, now_s)


def _require_drainable(state: ClusterState, slot: Slot) -> None:
    key, others = slot.key, [s for s in state.slots if s is not slot and s.ready is not None and not s.is_held]
    if state.closing:
        raise PlanError("the whole application is being drained; wait for its end")
    if slot.ready is None:
        raise PlanError(f"instance {key} is {slot.state.value}; only an instance that is ready can be drained")
    if not others:
        raise PlanError(f"instance {key} is the only one that serves; drain the application with `pengserve down`")


def _held(state: ClusterState, slot: Slot, why: str, timeout_s: float, now_s: float) -> Transition:
    """Its drain begins, or waits until its group has ended."""
    data = {"instance_id": slot.key.instance_id, "operation": _operation_id(slot), "timeout_s": timeout_s}
    change = EventDraft(kind=EventKind.INSTANCE_DRAIN_START, span=span(slot.key), why=why, data=data)
    held = replace(slot, deadline_s=now_s + timeout_s + LEAVE_S, is_held=True)
    if not _is_in_group(state, slot):
        held = replace(held, state=InstanceState.DRAINING, since_s=now_s)
    return transitions.with_slot(state, held, [change], now_s)


def go_on(state: ClusterState, now_s: float) -> Transition:
    """Lets those leave whose groups have ended, or that have waited for that until their time was over."""
    found = Transition(state=state)
    for instance_id in state.leaving:
        slot = found.state.slots[instance_id]
        if not _is_in_group(found.state, slot) or now_s >= slot.deadline_s - LEAVE_S:
            after = replace(slot, state=InstanceState.DRAINING, since_s=now_s)
            step = transitions.with_slot(found.state, after, [], now_s)
            found = Transition(state=step.state, changes=(*found.changes, *step.changes))
    return found


def _is_in_group(state: ClusterState, slot: Slot) -> bool:
    """Whether it serves with others, or may soon."""
    group = group_table(state.layout.groups).group_of.get(slot.key.instance_id)
    return slot.key.instance_id in state.busy_members or (group is not None and group.degree > 1)


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
    phase = DrainPhase.ENDING if slot.doomed else DrainPhase.DONE
    if slot.alive:
        phase = DrainPhase.LEAVING if slot.ready is not None else DrainPhase.MOVING
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
            found[slot.key.instance_id] = plan_evacuation(answer, leaders(state), name=name, must_leave=must_leave)
    return found


def leaders(state: ClusterState) -> Sequence[InstanceSnapshot]:
    """Instances that serve alone or lead a group, and are in no switch: requests can move to them with their KV."""
    group_of = group_table(state.layout.groups).group_of
    busy = state.busy_members
    found = []
    for slot, answer in zip(state.slots, state.answers, strict=True):
        instance_id = slot.key.instance_id
        group = group_of.get(instance_id)
        leads = group is None or group.leader == instance_id
        if slot.ready is not None and not slot.is_held and answer is not None and leads and instance_id not in busy:
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
            after = _held(found.state, slot, "an earlier controller was asked for it", timeout_s, now_s)
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
