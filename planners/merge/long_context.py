"""Use case 3 of Flying Serving: requests that are too long for one instance."""

from pengserve.planners.merge.history import Reason
from pengserve.planners.merge.look import Look, Step
from pengserve.planners.steps import can_merge, parts_of
from pengserve.planners.types.layout import Group

ON_THE_WAY_S = 2.0  # a new group is kept for so long: its request waited at an ingress, and must show up


def for_long_context(look: Look) -> Step | None:
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
        step = look.step_to(goal, Reason.LONG_CONTEXT, why, config.long_context_strategy)
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

    def is_able(goal: Group) -> bool:
        is_wide = look.view.max_tokens(goal, goal.shape) >= num_tokens
        return is_wide and (look.is_possible(goal) or _takes_in_kept(look, goal))

    found = (look.least_costly(degree, is_able) for degree in look.view.formable.tp_degrees)
    return next((goal for goal in found if goal is not None), None)


def _takes_in_kept(look: Look, goal: Group) -> bool:
    """Whether all that is claimed of `goal` is groups that become a part of it: it holds their long requests too."""
    claims = {look.claimed[member] for member in goal.members if member in look.claimed}
    is_still = look.view.snapshot.busy.isdisjoint(goal.members)
    return is_still and claims <= set(parts_of(look.view.group_of, goal)) and can_merge(look.view, goal)
