"""When to merge instances into tensor-parallel groups and when to split them (Flying Serving section 2.3).

Three reasons, the first first: a request that no route holds, requests that ask for a shape or are urgent, and load.
Each reason claims the groups it needs; the next one has what is left. A plan is one merge or one split. A merge takes
narrower groups as they are; where some cannot join, they are split first, and each call is judged anew.

What keeps the layout from flapping:

    reason        merges                                        splits
    long context  at once                                       when no such request runs or is on its way
    priority      at once, if `urgency` allows the group        `min_dwell_s` after the last such request
    load          low for `quiet_s`, and `min_dwell_s` after    above `split_above` after `min_dwell_s`;
                  the last split for load                       at once where requests queue

So a burst never waits for a dwell, and load changes the layout back and forth at most once in `min_dwell_s`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from heapq import nsmallest

import numpy as np

from pengserve.planners.columns import group_table, ready_instances
from pengserve.planners.load import OVERLOAD, ClusterView
from pengserve.planners.projection import projected_loads
from pengserve.planners.steps import can_merge, can_split, make_plan, next_step, parts_of, split_first
from pengserve.planners.types.config import MergeConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import ClusterSnapshot
from pengserve.planners.types.strategy import SwitchStrategy
from pengserve.planners.urgency import ANY_GROUP, Urgency

YOUNG_S = 1.0  # a new group is not split: what it was made for is still on its way
ON_THE_WAY_S = 2.0  # ... of a group for a long request: that waited at an ingress, and must show up
MOST = 3  # groups that stand, of which one is to serve urgent requests
QUEUE_S = 0.3  # a queue that stands for so long is one; a shorter one is an arrival between two steps


class Reason(StrEnum):
    """Why a group stands."""

    LONG_CONTEXT = "long context"
    PRIORITY = "priority"
    LOAD = "load"


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingGroup:
    """Since when a tp group is in the layout, and why."""

    since_s: float
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadHistory:
    """What the planner remembers from look to look. A value: a call returns the next one. Times are snapshot times."""

    running_groups: Mapping[Group, StandingGroup] = field(default_factory=dict)  # tp groups of the layout
    low_since_s: Mapping[Group, float] = field(default_factory=dict)  # groups that load would allow, and since when
    queue_since_s: Mapping[InstanceId, float] = field(default_factory=dict)  # leaders whose requests wait
    wanted_s: Mapping[int, float] = field(default_factory=dict)  # degrees, and when a request last asked for them
    priority_s: float | None = None  # when a priority request was last in flight
    relieved_s: float | None = None  # when a group was last split because of its load
    planned: tuple[Group, Reason] | None = None  # the newest merge that was planned
    seen_s: float | None = None  # the newest look


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The next primitive, why, and how."""

    group: Group
    is_merge: bool
    reason: Reason
    why: str
    strategy: str


@dataclass(slots=True, kw_only=True)
class Look:
    """One call's working state: what is free, and what may be split.

    `claimed` begins with what switches, and grows from reason to reason.
    """

    view: ClusterView
    config: MergeConfig
    history: LoadHistory
    claimed: dict[InstanceId, Group]
    urgency: Urgency

    @property
    def now_s(self) -> float:
        return self.view.snapshot.time_s

    def claim(self, group: Group) -> None:
        self.claimed.update(dict.fromkeys(group.members, group))

    def is_free(self, members: Iterable[InstanceId]) -> bool:
        """Whether no reason has claimed any of `members`, or a group that one of them would have to leave."""
        return not any(m in self.claimed for group in self.view.groups_over(members) for m in group.members)

    def age_s(self, group: Group) -> float:
        return self.now_s - self.history.running_groups[group].since_s

    def useful_degrees(self, groups: Iterable[Group]) -> set[int]:
        """Those of `groups` that are of use to urgent requests."""
        return {degree for degree in {group.degree for group in groups} if not self.urgency.is_slow(degree)}

    def harmful(self, groups: Sequence[Group]) -> frozenset[Group]:
        """Those that urgent requests leave alone, because they cost others too much."""
        return self.urgency.harmful(self.view, groups)

    def may_split(self, group: Group) -> bool:
        return self.age_s(group) >= YOUNG_S and can_split(self.view, group)

    def tp_groups(self) -> list[Group]:
        return [group for group in self.history.running_groups if group.leader in self.view.loads]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What the merge planner would do next, and which instances it counts on."""

    plan: SwitchPlan | None = None
    reason: Reason | None = None  # of the plan
    claimed: frozenset[InstanceId] = frozenset()  # for long and urgent requests: leave their groups alone
    history: LoadHistory = field(default_factory=LoadHistory)  # for the next call, where the plan is not followed
    followed: LoadHistory = field(default_factory=LoadHistory)  # ... and where it is
    look: "Look | None" = field(default=None, compare=False)  # what the judge of merges and splits for load asks


def propose(
    snapshot: ClusterSnapshot,
    config: MergeConfig,
    history: LoadHistory,
    *,
    is_judged: bool = False,
    urgency: Urgency = ANY_GROUP,
) -> Proposal:
    """The next merge or split, for a caller that may choose another switch.

    A function of its arguments alone. It must see the cluster regularly, also while nothing happens: the history
    measures how long things last. After a gap of more than `quiet_s` the measuring begins anew.

    Args:
        is_judged: merges and splits for load are the judge's: only what requests need is proposed.
        urgency: which groups urgent requests get.
    """
    if not snapshot.policy.is_auto:
        return Proposal(history=history, followed=history)
    if history.seen_s is not None and snapshot.time_s - history.seen_s > config.quiet_s:
        history = replace(history, low_since_s={}, queue_since_s={})  # nothing was measured during the gap
    queues = _queues(snapshot, history)
    lasting_queues = (i for i, since_s in queues.items() if snapshot.time_s - since_s >= QUEUE_S)
    view = ClusterView.of(snapshot, config.busy_requests, lasting_queues)
    history = _observe(view, config, replace(history, queue_since_s=queues, seen_s=snapshot.time_s), is_judged)
    look = Look(view=view, config=config, history=history, claimed=snapshot.claims, urgency=urgency)
    step = _for_long_context(look) or _for_wishes(look)
    if step is None:
        step = _resume_paused(look) if is_judged else _for_load(look)
    history, claimed = look.history, frozenset(look.claimed)
    if step is None:
        return Proposal(claimed=claimed, history=history, followed=history, look=look)
    strategy, why = SwitchStrategy(step.strategy), f"{step.reason}: {step.why}"
    plan = make_plan(snapshot, view.instances, step.group, step.is_merge, strategy, why)
    followed = history
    if step.is_merge:
        followed = replace(history, planned=(step.group, step.reason))
    elif step.reason is Reason.LOAD and view.load(step.group).load > config.split_above:
        followed = replace(history, relieved_s=snapshot.time_s)
    return Proposal(plan=plan, reason=step.reason, claimed=claimed, history=history, followed=followed, look=look)


# What is remembered


def _queues(snapshot: ClusterSnapshot, history: LoadHistory) -> dict[InstanceId, float]:
    before = history.queue_since_s
    waiting = np.flatnonzero(ready_instances(snapshot.instances).stat("num_waiting")).tolist()
    return {InstanceId(i): before.get(i, snapshot.time_s) for i in waiting}


def _observe(view: ClusterView, config: MergeConfig, history: LoadHistory, is_judged: bool) -> LoadHistory:
    snapshot = view.snapshot
    now_s, demands = snapshot.time_s, snapshot.demands
    wanted = {degree: now_s for d in demands for degree, num in d.wanted_degrees if num > 0}
    priority_s = now_s if any(d.num_priority > 0 for d in demands) else history.priority_s
    return replace(
        history,
        running_groups={
            g: _running_group(g, snapshot, history) for g in group_table(snapshot.layout.groups).of_kind[GroupKind.TP]
        },
        low_since_s={} if is_judged else dict(_low(view, config, history.low_since_s)),
        wanted_s={d: s for d, s in {**history.wanted_s, **wanted}.items() if now_s - s < config.min_dwell_s},
        priority_s=None if priority_s is None or now_s - priority_s >= config.min_dwell_s else priority_s,
    )


def _running_group(group: Group, snapshot: ClusterSnapshot, history: LoadHistory) -> StandingGroup:
    known = history.running_groups.get(group)
    if known is not None:
        return known
    is_planned = history.planned is not None and history.planned[0] == group
    reason = history.planned[1] if history.planned is not None and is_planned else Reason.LOAD
    return StandingGroup(since_s=snapshot.layout_since_s or snapshot.time_s, reason=reason)


def _low(view: ClusterView, config: MergeConfig, before: Mapping[Group, float]) -> Iterable[tuple[Group, float]]:
    """Groups whose load would be below `merge_below`. Where stats are stale, what was known stands."""
    now_s = view.snapshot.time_s
    for group, _, is_known in projected_loads(view, config.max_degree, config.merge_below):
        if is_known or group in before:
            yield group, before.get(group, now_s)


# Use case 3: requests that are too long for one instance


def _for_long_context(look: Look) -> _Step | None:
    view, config = look.view, look.config
    for group in look.tp_groups():
        if _is_kept_for_long(look, group):
            look.claim(group)
    waiting = sorted({d.longest_waiting_tokens for d in view.snapshot.demands if d.longest_waiting_tokens > 0})
    if not waiting:
        return None
    longest_route = max((view.max_tokens(group, group.shape) for group in view.groups()), default=0)
    for num_tokens in reversed(waiting):
        if num_tokens <= longest_route:
            _claim_narrowest(look, num_tokens)
            continue
        goal = _narrowest(look, num_tokens)
        if goal is None:
            continue  # no group holds it, or those that do are taken: a shorter request may still be helped
        why = f"a request of {num_tokens} tokens waits, the widest route holds {longest_route}"
        step = _step_to(look, goal, Reason.LONG_CONTEXT, why, config.long_context_strategy)
        look.claim(goal)
        return step
    return None


def _is_kept_for_long(look: Look, group: Group) -> bool:
    """A request runs there that fits nowhere narrower, or is on its way, or may have grown to it."""
    if look.view.needs_group(group):
        return True
    if look.history.running_groups[group].reason is not Reason.LONG_CONTEXT:
        return False
    load = look.view.load(group)
    return look.age_s(group) < ON_THE_WAY_S or (load.num_requests > 0 and load.load <= look.config.split_above)


def _claim_narrowest(look: Look, num_tokens: int) -> None:
    """Keeps a route for a request that has not reached it yet."""
    able = [g for g in look.tp_groups() if look.view.max_tokens(g, g.shape) >= num_tokens]
    if able:
        look.claim(min(able, key=lambda g: (g.degree, g.members)))


def _narrowest(look: Look, num_tokens: int) -> Group | None:
    """The narrowest group that holds `num_tokens`, on the least loaded members; free of others' claims."""
    wide = [g for g in look.view.tp_groups if look.view.max_tokens(g, g.shape) >= num_tokens]
    able = [g for g in wide if _is_possible(look, g) or _takes_in_kept(look, g)]
    return min(able, key=lambda g: (g.degree, *_cost(look, g)), default=None)


def _takes_in_kept(look: Look, goal: Group) -> bool:
    """Whether all that is claimed of `goal` is groups that become a part of it: it holds their long requests too."""
    claims = {look.claimed[member] for member in goal.members if member in look.claimed}
    is_still = look.view.snapshot.busy.isdisjoint(goal.members)
    return is_still and claims <= set(parts_of(look.view.group_of, goal)) and can_merge(look.view, goal)


# Use case 2: requests that are urgent or ask for a shape


def _for_wishes(look: Look) -> _Step | None:
    wanted_degrees = sorted(look.history.wanted_s)
    # Groups that run come first: two wishes that exclude each other must not take turns.
    unmet = [degree for degree in wanted_degrees if not _claim_running(look, {degree})]
    is_any_tp_wanted = look.history.priority_s is not None and not any(degree > 1 for degree in wanted_degrees)
    if is_any_tp_wanted and not _claim_running(look, look.useful_degrees(look.tp_groups()), is_urgency=True):
        unmet += _priority_degrees(look)
    for degree in unmet:
        step = _dp_for_wish(look) if degree == 1 else _tp_for_wish(look, degree, is_urgency=is_any_tp_wanted)
        if step is not None:
            return step
    return None


def _claim_running(look: Look, degrees: set[int], *, is_urgency: bool = False) -> bool:
    """Claims a group of the layout for wishes; the widest, and rather one that stands for a wish.

    One that keeps paused requests waiting for long comes last, so that it can end where another serves as well. Only
    the first few of many are asked for what they cost others.
    """
    running_groups = look.history.running_groups
    able = [g for g in look.view.groups() if g.tensor_degree in degrees and not _is_needed_by_all(look, g)]
    for_others = [g.kind is GroupKind.TP and running_groups[g].reason is not Reason.PRIORITY for g in able]
    holds_up = [_holds_up(look, g) for g in able]
    ranked = zip(holds_up, for_others, able, strict=True)
    first = nsmallest(
        MOST, ranked, key=lambda row: (row[0], row[1], -row[2].tensor_degree, row[2].degree, row[2].members)
    )
    left = look.harmful([group for *_, group in first]) if is_urgency else ()
    found = next((group for *_, group in first if group not in left), None)
    if found is None:
        return False
    if found.kind is not GroupKind.PP:  # one that is restored serves a wish for dp all the more
        look.claim(found)
    return True


def _holds_up(look: Look, group: Group) -> bool:
    """Whether requests have been paused for `group` for as long as a turn of the layout lasts."""
    is_tp = group.kind is GroupKind.TP
    return is_tp and look.age_s(group) >= look.config.min_dwell_s and look.view.num_paused(group) > 0


def _is_needed_by_all(look: Look, group: Group) -> bool:
    """Whether `group` is all there is, and so loaded that its members serve best effort better alone."""
    if not _takes_all(look, group):
        return False
    is_choice = look.history.running_groups[group].reason is Reason.LOAD and any(
        g.degree < group.degree for g in look.view.tp_groups
    )
    load = look.view.load(group)
    return load.load >= OVERLOAD or (is_choice and load.load > look.config.split_above)


def _priority_degrees(look: Look) -> list[int]:
    """The degree of a group for urgent requests: the widest that leaves half of the instances, else the narrowest."""
    degrees = sorted(look.useful_degrees(g for g in look.view.tp_groups if g.degree <= look.config.max_degree))
    halves = [d for d in degrees if 2 * d <= len(look.view.instances)]
    return halves[-1:] or degrees[:1]


def _dp_for_wish(look: Look) -> _Step | None:
    able = [g for g in look.tp_groups() if look.is_free(g.members) and look.may_split(g)]
    if not able:
        return None
    group = min(able, key=lambda g: (g.degree, look.view.load(g).load, g.members))
    why = "a request asks for dp, and no instance is alone"
    return _Step(group=group, is_merge=False, reason=Reason.PRIORITY, why=why, strategy=look.config.priority_strategy)


def _tp_for_wish(look: Look, degree: int, *, is_urgency: bool) -> _Step | None:
    able = [
        g for g in look.view.tp_groups if g.degree == degree and _is_possible(look, g) and not _starves_others(look, g)
    ]
    if not able:
        return None
    goal = min(able, key=lambda g: _cost(look, g))
    if is_urgency and look.harmful([goal]):
        return None
    strategy = look.config.priority_strategy
    if goal.degree >= len(look.view.instances) and _num_requests(look) > 0:
        strategy = SwitchStrategy.CARRY  # no other instance can serve paused requests: all must go on
    load = sum(look.view.load(g).num_requests for g in look.view.groups_over(goal.members))
    why = f"requests ask for tp{degree} or are urgent, {load} requests run on its members"
    step = _step_to(look, goal, Reason.PRIORITY, why, strategy)
    look.claim(goal)
    return step


def _starves_others(look: Look, goal: Group) -> bool:
    """Whether `goal` would leave no instance to best effort, although there are more than it needs, or all queue."""
    if not _takes_all(look, goal):
        return False
    projected, relieved_s = look.view.projected(goal), look.history.relieved_s
    is_busy = projected is not None and projected.load >= OVERLOAD
    is_relieved = relieved_s is not None and look.now_s - relieved_s < look.config.min_dwell_s
    return len(look.view.instances) > goal.degree or is_busy or is_relieved


def _takes_all(look: Look, group: Group) -> bool:
    """Whether best effort runs, and claims and `group` leave no instance to it."""
    is_all = group.tensor_degree > 1 and all(i in look.claimed or i in group.members for i in look.view.instances)
    return is_all and _has_best_effort(look)


def _has_best_effort(look: Look) -> bool:
    demands = look.view.snapshot.demands
    num_special = sum(max(d.num_priority, sum(num for _, num in d.wanted_degrees)) for d in demands)
    return _num_requests(look) > num_special


# Use case 1: load


def _for_load(look: Look) -> _Step | None:
    free = [g for g in look.tp_groups() if look.is_free(g.members)]
    return _relieve(look, free) or _end_of_reason(look, free) or _merge_idle(look)


def _resume_paused(look: Look) -> _Step | None:
    """Splits a group that no request needs any more, where requests are paused: nothing else lets them go on."""
    for group in look.tp_groups():
        paused = look.view.num_paused(group) if look.is_free(group.members) else 0
        if paused and look.may_split(group) and look.age_s(group) >= look.config.min_dwell_s:
            why = f"nothing needs {group} any more, and {paused} requests are paused"
            reason, strategy = look.history.running_groups[group].reason, look.config.load_strategy
            return _Step(group=group, is_merge=False, reason=reason, why=why, strategy=strategy)
    return None


def _relieve(look: Look, free: list[Group]) -> _Step | None:
    """Splits the most loaded group, where more than one request would gain."""
    config, able = look.config, []
    for group in free:
        load = look.view.load(group)
        is_due = load.load >= OVERLOAD or look.age_s(group) >= config.min_dwell_s
        if load.load > config.split_above and load.num_requests > 1 and is_due and look.may_split(group):
            able.append((-load.load, group.members, group, load))
    if not able:
        return None
    _, _, group, load = min(able)
    why = f"{group} has load {load.load:.2f} > {config.split_above:g}, {load.num_waiting} of {load.num_requests} wait"
    return _Step(group=group, is_merge=False, reason=Reason.LOAD, why=why, strategy=config.load_strategy)


def _end_of_reason(look: Look, free: list[Group]) -> _Step | None:
    """Splits a group that no request needs any more, or hands it to the load rule where load allows it."""
    config, running_groups = look.config, dict(look.history.running_groups)
    step = None
    for group in free:
        load, paused = look.view.load(group), look.view.num_paused(group)
        reason = running_groups[group].reason
        if not load.is_known or (reason is Reason.LOAD and not paused) or look.age_s(group) < config.min_dwell_s:
            continue
        if paused or load.load >= config.merge_below:
            if step is None and look.may_split(group):
                why = f"nothing needs {group} any more (load {load.load:.2f}, {paused} requests paused)"
                step = _Step(group=group, is_merge=False, reason=reason, why=why, strategy=config.load_strategy)
        else:
            running_groups[group] = replace(running_groups[group], reason=Reason.LOAD)
    look.history = replace(look.history, running_groups=running_groups)
    return step


def _merge_idle(look: Look) -> _Step | None:
    """Forms the widest group that has been allowed by load for long enough."""
    config, history, view = look.config, look.history, look.view
    if history.relieved_s is not None and look.now_s - history.relieved_s < config.min_dwell_s:
        return None
    low = [
        g
        for g, since_s in history.low_since_s.items()
        if look.now_s - since_s >= config.quiet_s and g not in history.running_groups
    ]
    for goal in sorted(low, key=lambda g: (-g.degree, g.members)):
        load = view.projected(goal)
        if load is None or not load.is_known or not look.is_free(goal.members) or not _is_possible(look, goal):
            continue
        if config.load_strategy == SwitchStrategy.HARD and load.num_requests:
            continue  # it would pause requests for as long as the load is low
        parts = [g for g in view.groups_over(goal.members) if g in history.running_groups]
        if any(look.age_s(part) < config.min_dwell_s for part in parts):
            continue
        low_s = look.now_s - history.low_since_s[goal]
        why = f"load {load.load:.2f} < {config.merge_below:g} for {low_s:.1f} s"
        step = _step_to(look, goal, Reason.LOAD, why, config.load_strategy)
        if step is not None:
            return step
    return None


# Common to all reasons


def _step_to(look: Look, goal: Group, reason: Reason, why: str, strategy: str) -> _Step | None:
    """The next step to `goal`; None while it must wait."""
    found = next_step(look.view, goal, look.may_split)
    if found is None:
        return None
    group, is_merge = found
    why = why if is_merge else f"{why}; {goal} needs its members"
    return _Step(group=group, is_merge=is_merge, reason=reason, why=why, strategy=strategy)


def _is_possible(look: Look, goal: Group) -> bool:
    """Whether nothing claimed is in the way of `goal`, and no step towards it must wait."""
    return look.is_free(goal.members) and next_step(look.view, goal, lambda g: can_split(look.view, g)) is not None


def _cost(look: Look, goal: Group) -> tuple[int, float, int, tuple[InstanceId, ...]]:
    """What forming `goal` disturbs: requests, then KV, then groups to split; ties go to the lowest rank."""
    parts = look.view.groups_over(goal.members)
    loads = [look.view.load(part) for part in parts]
    num_splits = len(split_first(look.view, goal))
    return sum(load.num_requests for load in loads), sum(load.kv_share for load in loads), num_splits, goal.members


def _num_requests(look: Look) -> int:
    """Requests that run or wait anywhere."""
    return sum(load.num_requests for load in look.view.loads.values())
