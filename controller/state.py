"""The cluster's state and its transitions. Pure: no clock, no I/O, no tasks.

    slots.py      one slot: a life begins, is READY, drains, ends
    layout.py     how the instances are grouped, by switches and by what they say they run
    directory.py  who their peers are, and which groups must be ready
    routes.py     where requests go
    rollover.py   instances of an earlier configuration

Each transition goes through them in this order, since each follows from the ones before.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pengserve.controller import directory as wirings
from pengserve.controller import layout as layouts
from pengserve.controller import rollover, routes
from pengserve.controller import slots as lives
from pengserve.controller.directory import PeerWiring
from pengserve.controller.events import EventDraft
from pengserve.controller.rollover import Outgoing
from pengserve.controller.routes import Part
from pengserve.controller.slots import Gone, Killed, Observation, Slot, span
from pengserve.planners.columns import Kept, group_table
from pengserve.planners.replace import Vacancy, plan_replacements
from pengserve.planners.types.codec import to_data
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.errors import FenceError
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey, Version
from pengserve.planners.types.layout import Group, Layout
from pengserve.planners.types.plans import ReplacePlan, SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot, InstanceState, RoutingTable

# The state ------------------------------------------------------------------------------------------------------------


PATIENCE_WITH_A_START_S = 120.0  # after which a start is no reason for others to wait


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """All that the controller knows. Transitions return a new one."""

    config: ControllerConfig
    slots: tuple[Slot, ...]  # slot i is instance id i
    answers: tuple[InstanceSnapshot | None, ...]  # by slot; the newest of the life in it, where it has a snapshot
    seen_s: tuple[float, ...]  # by slot; when that came
    layout: Layout
    routing: RoutingTable
    wiring: PeerWiring
    parts: tuple[Part | None, ...] = ()  # of the routing table, by slot
    formable: tuple[Group, ...] = ()  # whose members are all READY with lanes and communicators
    wired: tuple[Slot, ...] = ()  # the slots that parts, formable and wiring were made from
    switches: tuple[SwitchPlan, ...] = ()  # under way; no two have a member in common
    layout_since_s: float = 0.0  # when the layout last changed, on the controller's monotonic clock
    strays: tuple[InstanceKey, ...] = ()  # lives outside the slots, to be killed
    outgoing: tuple[Outgoing, ...] = ()  # lives of an earlier configuration, outside the slots
    closing: bool = False  # the application ends: nothing is filled again

    @property
    def busy_members(self) -> frozenset[InstanceId]:
        """Members of the switches under way."""
        return frozenset(member for plan in self.switches for member in plan.group.members)

    @property
    def leaving(self) -> tuple[InstanceId, ...]:
        """Instances whose drain waits until their groups have ended: they serve on until then."""
        return tuple(slot.key.instance_id for slot in self.slots if slot.is_held and slot.ready is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A new state and what happened on the way there."""

    state: ClusterState
    changes: tuple[EventDraft, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What the state calls for. Doing a thing again that is being done is harmless."""

    kills: tuple[InstanceKey, ...] = ()
    drains: tuple[InstanceKey, ...] = ()
    retirements: tuple[Outgoing, ...] = ()
    replace: ReplacePlan | None = None


def empty(config: ControllerConfig, *, version: Version, epoch: Epoch) -> ClusterState:
    """No instance yet. `version` and `epoch` are above all that earlier controllers gave out."""
    slots = tuple(Slot(key=InstanceKey(instance_id=InstanceId(i), incarnation=0)) for i in range(config.num_instances))
    return ClusterState(
        config=config,
        slots=slots,
        answers=(None,) * len(slots),
        seen_s=(0.0,) * len(slots),
        layout=Layout.all_dp(tuple(s.key.instance_id for s in slots), epoch),
        routing=RoutingTable(version=version, epoch=epoch, routes=()),
        wiring=wirings.empty(version),
        parts=(None,) * len(slots),
    )


# Transitions ----------------------------------------------------------------------------------------------------------


def observe(state: ClusterState, seen: Sequence[tuple[InstanceKey, Observation]], now_s: float) -> Transition:
    """Takes in what was learnt, and what silence since then means."""
    changes: list[EventDraft] = []
    slots, strays = list(state.slots), state.strays
    answers, seen_s = list(state.answers), list(state.seen_s)
    outgoing = {life.key: life for life in state.outgoing}
    for key, observation in seen:
        at = key.instance_id
        slot = slots[at] if at < len(slots) else None
        if isinstance(observation, Killed) and key in strays:
            strays = tuple(k for k in strays if k != key)
        elif outgoing and key in outgoing:
            if rollover.take_in(outgoing[key], observation, now_s, changes):
                del outgoing[key]
                strays = (*strays, key)
        elif slot is not None:
            if isinstance(observation, InstanceSnapshot):
                if observation.stats.step_age_s and (hang := observation.stats.hang):
                    observation = Gone(hang)
                elif slot.alive and (key is slot.key or key == slot.key):
                    answers[at], seen_s[at] = observation, now_s
                    if lives.says_the_same(slot, observation):
                        continue
            slots[at] = lives.take_in(slot, key, observation, state.config, now_s, changes)
    ready = InstanceState.READY
    for i, slot in enumerate(slots):
        if slot.state is not ready or seen_s[i] < now_s:
            slots[i] = lives.overdue(slot, seen_s[i], state.config, now_s, changes)
    late = [key for key, life in outgoing.items() if rollover.overdue(life, now_s, changes)]
    after = replace(
        state,
        slots=_kept(state.slots, slots),
        answers=tuple(answers),
        seen_s=tuple(seen_s),
        strays=(*strays, *late),
        outgoing=tuple(life for key, life in outgoing.items() if key not in late),
    )
    # The layout has followed from these slots already, where no switch under way has kept it from that.
    is_followed = after.slots is state.wired and not state.switches
    return (_rewired if is_followed else _followed)(after, state, changes, now_s)


def create(state: ClusterState, slots: Iterable[InstanceId], why: str, now_s: float) -> Transition:
    """Begins a new life in each of the empty `slots`; the caller creates the instances."""
    changes: list[EventDraft] = []
    filled = list(state.slots)
    for instance_id in slots:
        slot = filled[instance_id]
        assert not slot.alive and not slot.doomed, f"slot {instance_id} is not vacant"
        key = InstanceKey(instance_id=instance_id, incarnation=slot.key.incarnation + 1)
        filled[instance_id] = lives.begun(slot, key, now_s)
        data = {"failures_in_a_row": slot.failures}
        changes.append(EventDraft(kind=EventKind.INSTANCE_START, span=span(key), why=slot.failure or why, data=data))
    return Transition(state=replace(state, slots=tuple(filled)), changes=tuple(changes))


def adopt(
    state: ClusterState,
    living: Mapping[InstanceKey, InstanceSnapshot | None],
    leftovers: Sequence[InstanceKey],
    newest: Sequence[InstanceKey],
    now_s: float,
    outgoing: Sequence[InstanceKey] = (),
) -> Transition:
    """Rebuilds an empty state from what an earlier controller left.

    The highest incarnation in a slot wins, the others are killed, as is what is outside the slots. `living` maps to
    None where an instance gave no answer yet: it counts as STARTING. Incarnations go on above `newest`, so that no
    ingress takes a new life for one that it saw die. What is `outgoing` is of another configuration: it is in no slot.
    """
    keys_of: dict[InstanceId, list[InstanceKey]] = {}
    for key in {*living, *leftovers}:
        keys_of.setdefault(key.instance_id, []).append(key)
    last = {key.instance_id: key for key in sorted([*newest, *outgoing])}
    changes: list[EventDraft] = []
    slots = []
    for slot in state.slots:
        slot = replace(slot, key=last.get(slot.key.instance_id, slot.key))
        keys = sorted(keys_of.pop(slot.key.instance_id, []), reverse=True)
        if keys:
            # Only the newest life may be taken over: where that is a leftover, an older one has lost the slot.
            top = keys[0]
            taken = top in living
            slot = replace(slot, key=top, doomed=tuple(keys[1:] if taken else keys), failure="")
            if taken:
                slot = lives.adopted(slot, living[top], state.config, now_s, changes)
        slots.append(slot)
    strays = tuple(sorted(key for keys in keys_of.values() for key in keys))
    layout, _ = layouts.follow(state.layout, slots)
    if layout is not state.layout:
        # The first epoch of this controller is above all that instances report. The caller logs it.
        reported = max((answer.epoch for answer in living.values() if answer is not None), default=0)
        layout = replace(layout, epoch=Epoch(max(state.layout.epoch, reported + 1)))
    found = replace(
        state,
        slots=tuple(slots),
        answers=tuple(slot.snapshot for slot in slots),
        seen_s=(now_s,) * len(slots),
        strays=strays,
        outgoing=rollover.begun(outgoing, state.config, now_s, changes),
        layout=layout,
        layout_since_s=now_s,
    )
    return _rewired(found, state, changes, now_s)


def begin_switch(state: ClusterState, plan: SwitchPlan) -> Transition:
    """Marks `plan` as under way.

    Raises:
        FenceError: it was made for another epoch, or another switch is under way with one of its members.
    """
    for other in state.switches:
        if not plan.is_apart(other):
            raise FenceError(f"switch {other.plan_id} is still under way; plan again when it has ended")
    if plan.epoch != state.layout.epoch:
        raise FenceError(f"the plan is for epoch {plan.epoch}, and the layout's is {state.layout.epoch}; plan again")
    require_groups(state, plan)
    data = {"epoch": plan.epoch, **_kind_of(plan), "members": [str(key) for key in plan.members]}
    change = EventDraft(kind=EventKind.TRANSITION_START, span=switch_span(plan), why=plan.why, data=data)
    return Transition(state=replace(state, switches=(*state.switches, plan)), changes=(change,))


def require_groups(state: ClusterState, plan: SwitchPlan) -> None:
    """Raise FenceError where the groups that `plan` was made for do not stand, or nothing may switch any more.

    Other groups may have changed since, and the layout's epoch with them.
    """
    if state.closing:
        raise FenceError("the application is being drained, and nothing switches any more")
    if not layouts.stands(state.layout, plan.before):
        raise FenceError(f"{' '.join(map(str, plan.before))} are not in the layout any more; plan again")


def end_switch(
    state: ClusterState, plan: SwitchPlan, report: SwitchReport, seconds: Mapping[str, float], now_s: float
) -> Transition:
    """Takes in that the leader has committed `plan`; `seconds` are the controller's, by phase."""
    data = {**_kind_of(plan), **to_data(report), **seconds}
    changes = [EventDraft(kind=EventKind.TRANSITION_END, span=switch_span(plan), why=plan.why, data=data)]
    layout = layouts.committed(state.layout, state.slots, plan, report.epoch)
    slots = list(state.slots)
    for key in plan.members:
        if slots[key.instance_id].key == key:
            slots[key.instance_id] = replace(slots[key.instance_id], switched=report.epoch)
    after = replace(state, switches=_others(state, plan), slots=tuple(slots))
    if layout is not None:
        changes.append(layouts.changed(layout, plan.why))
        after = replace(after, layout=layout, layout_since_s=now_s)
    return _followed(after, state, changes, now_s)


def fail_switch(state: ClusterState, plan: SwitchPlan, why: str, now_s: float) -> Transition:
    """Ends a switch that was aborted, or whose outcome the controller does not know: members' answers tell it later."""
    data = _kind_of(plan)
    changes = [EventDraft(kind=EventKind.TRANSITION_ERROR, span=switch_span(plan), why=why, data=data)]
    return _followed(replace(state, switches=_others(state, plan)), state, changes, now_s)


def _others(state: ClusterState, plan: SwitchPlan) -> tuple[SwitchPlan, ...]:
    """The switches that are under way beside `plan`."""
    return tuple(other for other in state.switches if other.plan_id != plan.plan_id)


def drain_all(state: ClusterState, why: str, timeout_s: float, now_s: float) -> Transition:
    """Ends the application: no route any more, READY instances finish what they run, the others end at once."""
    changes: list[EventDraft] = []
    slots = []
    for slot in state.slots:
        if slot.state is InstanceState.READY:
            slot = lives.draining(slot, why, now_s + timeout_s, now_s, changes)
        elif slot.state is InstanceState.STARTING:
            changes.append(
                EventDraft(kind=EventKind.INSTANCE_ERROR, span=span(slot.key), why=f"not ready yet when {why}")
            )
            slot = lives.ended(slot, why, now_s)
        slots.append(slot)
    outgoing = tuple(replace(life, deadline_s=min(life.deadline_s, now_s + timeout_s)) for life in state.outgoing)
    return _rewired(replace(state, slots=tuple(slots), outgoing=outgoing, closing=True), state, changes, now_s)


def with_slot(state: ClusterState, slot: Slot, changes: list[EventDraft], now_s: float) -> Transition:
    """The state with another value of one slot, and all that follows from it."""
    slots = tuple(slot if other.key.instance_id == slot.key.instance_id else other for other in state.slots)
    return _followed(replace(state, slots=slots), state, changes, now_s)


def plan(state: ClusterState, now_s: float) -> Actions:
    """What the state calls for now."""
    kills, drains, vacancies = list(state.strays), [], []
    ready = InstanceState.READY
    for slot in state.slots:
        if slot.doomed:
            kills.extend(slot.doomed)
        if slot.state is ready:
            continue
        if slot.state is InstanceState.DRAINING:
            # A follower has no requests of its own, but its leader needs it until the group's are done.
            instance_id = slot.key.instance_id
            group = group_table(state.layout.groups).group_of.get(instance_id)
            if group is None or group.leader == instance_id or not state.slots[group.leader].alive:
                drains.append(slot.key)
        elif not slot.alive and not slot.doomed and not slot.is_held:
            vacancies.append(Vacancy(last_key=slot.key, retry_at_s=slot.retry_at_s, why=slot.failure))
    return Actions(
        kills=tuple(kills),
        drains=tuple(drains),
        retirements=state.outgoing,
        replace=None
        if state.closing
        else plan_replacements(vacancies, epoch=state.layout.epoch, now_s=now_s, num_starts=_starts_left(state, now_s)),
    )


def _starts_left(state: ClusterState, now_s: float) -> int | None:
    """How many instances may begin to start now; None: all. One that takes very long no longer keeps others waiting."""
    if not state.config.max_starting:
        return None
    loading = [
        slot
        for slot in state.slots
        if slot.state is InstanceState.STARTING and now_s - slot.since_s < PATIENCE_WITH_A_START_S
    ]
    return max(0, state.config.max_starting - len(loading))


def snapshot(state: ClusterState, *, time_s: float, started_s: float, now_s: float | None = None) -> ClusterSnapshot:
    """What planners, the CLI and the dashboards see. A slot that is not READY shows how its last life ended.

    `time_s` is the wall clock's, `now_s` the monotonic clock's at the same moment (or None: the layout is new).
    """
    age_s = 0.0 if now_s is None else now_s - state.layout_since_s
    return ClusterSnapshot(
        app=state.config.app,
        time_s=time_s,
        layout=state.layout,
        instances=_shown(state.slots, state.answers),
        routing_version=state.routing.version,
        controller_started_s=started_s,
        ranks=state.wiring.topology.ranks or wirings.ranks_of(state.slots),
        groups=state.formable,
        layout_since_s=time_s - age_s,
        leaving=state.leaving,
    )


@Kept
def _shown(slots: tuple[Slot, ...], answers: tuple[InstanceSnapshot | None, ...]) -> tuple[InstanceSnapshot, ...]:
    """All slots as planners see them; a tick that begins several switches looks at them several times."""
    return tuple(map(lives.shown, slots, answers))


def what(plan: SwitchPlan) -> str:
    """E.g. "merge tp2@(0,1) (carry)"."""
    return f"{plan.verb} {plan.group} ({plan.strategy})"


def _kind_of(plan: SwitchPlan) -> dict[str, Any]:
    """What all events of a switch say of it, for people and for metrics."""
    parts = " ".join(map(str, plan.parts))
    kind = {"what": what(plan), "switch": plan.verb, "shape": plan.group.shape, "parts": parts}
    return kind | {"strategy": plan.strategy.value}


def switch_span(plan: SwitchPlan) -> str:
    """The span of a switch in the event log."""
    return f"switch:{plan.plan_id}"


# What follows from the slots ------------------------------------------------------------------------------------------


def _followed(state: ClusterState, before: ClusterState, changes: list[EventDraft], now_s: float) -> Transition:
    """The state with the layout that its instances have, and all that follows from that."""
    if not state.closing and state.config.is_elastic:
        layout, why = layouts.follow(state.layout, state.slots, state.busy_members)
        if layout is not state.layout:
            changes.append(layouts.changed(layout, why))
            state = replace(state, layout=layout, layout_since_s=now_s)
    return _rewired(state, before, changes, now_s)


def _rewired(state: ClusterState, before: ClusterState, changes: list[EventDraft], now_s: float) -> Transition:
    """The state with its directory, and a new routing table where the part of a slot or the layout has changed."""
    is_due = not state.wired or wirings.is_due(state.wiring, state.config, now_s)
    is_same = state.layout is before.layout and state.closing == before.closing and not is_due
    if is_same and state.slots is state.wired:
        return Transition(state=state, changes=tuple(changes))
    wiring, parts, formable = state.wiring, state.parts, state.formable
    pairs = zip(state.slots, state.wired, strict=True) if state.wired else ()
    changed = [(i, new, old) for i, (new, old) in enumerate(pairs) if new is not old]
    if not state.wired:
        parts = tuple(routes.part(slot) for slot in state.slots)
    elif changed:
        found = list(parts)
        for i, new, _ in changed:
            found[i] = routes.part(new)
        parts = tuple(found)
    if not is_same or not all(wirings.is_wired_alike(new, old) for _, new, old in changed):
        wiring = wirings.rewired(wiring, state.slots, state.layout, state.config, now_s)
    is_same_directory = wiring.directory is state.wiring.directory
    if not (state.wired and is_same_directory and all(wirings.has_same_groups(new, old) for _, new, old in changed)):
        formable = wirings.formable(wiring, state.slots)
    is_wide = group_table(state.layout.groups).is_wide
    is_routed = bool(state.wired) and all(
        routes.are_alike(parts[i], state.parts[i], is_wide(new.key.instance_id)) for i, new, _ in changed
    )
    state = replace(state, wiring=wiring, parts=parts, formable=formable, wired=state.slots)
    if is_routed and state.layout is before.layout and state.closing == before.closing:
        return Transition(state=state, changes=tuple(changes))
    table = routes.table(before.routing, parts, state.layout, wiring.topology.groups, is_draining=state.closing)
    if replace(table, version=before.routing.version) == before.routing:
        return Transition(state=state, changes=tuple(changes))
    data = {
        "term": table.version.term,
        "version": table.version.counter,
        "epoch": table.epoch,
        **routes.difference(before.routing.routes, table.routes),
    }
    changes.append(EventDraft(kind=EventKind.ROUTING_CHANGED, data=data))
    return Transition(state=replace(state, routing=table), changes=tuple(changes))


def _kept(before: tuple[Slot, ...], slots: list[Slot]) -> tuple[Slot, ...]:
    """The slots; the same object where all of them are."""
    return before if all(map(operator.is_, before, slots)) else tuple(slots)
