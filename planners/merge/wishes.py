"""Use case 2 of Flying Serving: requests that are urgent or ask for a shape."""

from collections.abc import Collection
from heapq import nsmallest

from pengserve.planners.load import OVERLOAD
from pengserve.planners.merge.history import Reason
from pengserve.planners.merge.look import Look, Step
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.strategy import SwitchStrategy

MOST = 3  # groups that stand, of which one is to serve urgent requests


def for_wishes(look: Look) -> Step | None:
    wanted_degrees = sorted(look.history.wanted_s)
    # Groups that run come first: two wishes that exclude each other must not take turns.
    unmet = [degree for degree in wanted_degrees if not _claim_running(look, {degree})]
    is_any_tp_wanted = look.history.priority_s is not None and not any(degree > 1 for degree in wanted_degrees)
    if is_any_tp_wanted and not _claim_running(look, look.useful(g.degree for g in look.tp_groups()), is_urgency=True):
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
    groups = look.view.groups() if 1 in degrees else look.tp_groups()  # few of a thousand are wide
    able = [g for g in groups if g.tensor_degree in degrees and not _is_needed_by_all(look, g)]
    for_others = [g.kind is GroupKind.TP and running_groups[g].reason is not Reason.PRIORITY for g in able]
    holds_up = [_holds_up(look, g) for g in able]
    ranked = zip(holds_up, for_others, able, strict=True)
    first = nsmallest(
        MOST, ranked, key=lambda row: (row[0], row[1], -row[2].tensor_degree, row[2].degree, row[2].members)
    )
    left = _harmful(look, [group for *_, group in first]) if is_urgency and first else ()
    found = next((group for *_, group in first if group not in left), None)
    if found is None:
        return False
    if found.kind is not GroupKind.PP:  # one that is restored serves a wish for dp all the more
        look.claim(found)
    return True


def _harmful(look: Look, groups: Collection[Group]) -> frozenset[Group]:
    """Those of `groups` that cost others too much; what could be formed instead of them is priced with them."""
    instead = [_goal_for_wish(look, degree) for degree in _priority_degrees(look)]
    return look.harmful([*groups, *[goal for goal in instead if goal is not None]])


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
    degrees = sorted(look.useful(d for d in look.view.formable.tp_degrees if d <= look.config.max_degree))
    halves = [d for d in degrees if 2 * d <= len(look.view.instances)]
    return halves[-1:] or degrees[:1]


def _dp_for_wish(look: Look) -> Step | None:
    able = [g for g in look.tp_groups() if look.is_free(g.members) and look.may_split(g)]
    if not able:
        return None
    group = min(able, key=lambda g: (g.degree, look.view.load(g).load, g.members))
    why = "a request asks for dp, and no instance is alone"
    return Step(group=group, is_merge=False, reason=Reason.PRIORITY, why=why, strategy=look.config.priority_strategy)


def _tp_for_wish(look: Look, degree: int, *, is_urgency: bool) -> Step | None:
    goal = _goal_for_wish(look, degree)
    if goal is None or (is_urgency and look.harmful([goal])):
        return None
    strategy = look.config.priority_strategy
    if goal.degree >= len(look.view.instances) and look.num_requests > 0:
        strategy = SwitchStrategy.CARRY  # no other instance can serve paused requests: all must go on
    load = sum(look.view.load(g).num_requests for g in look.view.groups_over(goal.members))
    why = f"requests ask for tp{degree} or are urgent, {load} requests run on its members"
    step = look.step_to(goal, Reason.PRIORITY, why, strategy)
    look.claim(goal)
    return step


def _goal_for_wish(look: Look, degree: int) -> Group | None:
    return look.least_costly(degree, lambda g: look.is_possible(g) and not _starves_others(look, g))


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
    return look.num_requests > num_special
