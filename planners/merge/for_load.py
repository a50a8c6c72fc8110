"""Use case 1 of Flying Serving: load, where no judge prices merges and splits; and groups that nothing needs."""

from dataclasses import replace

from pengserve.planners.load import OVERLOAD
from pengserve.planners.merge.history import Reason
from pengserve.planners.merge.look import Look, Step
from pengserve.planners.types.layout import Group
from pengserve.planners.types.strategy import SwitchStrategy


def for_load(look: Look) -> Step | None:
    free = [g for g in look.tp_groups() if look.is_free(g.members)]
    return _relieve(look, free) or _end_of_reason(look, free) or _merge_idle(look)


def resume_paused(look: Look) -> Step | None:
    """Splits a group that no request needs any more, where requests are paused: nothing else lets them go on."""
    for group in look.tp_groups():
        paused = look.view.num_paused(group) if look.is_free(group.members) else 0
        if paused and look.may_split(group) and look.age_s(group) >= look.config.min_dwell_s:
            why = f"nothing needs {group} any more, and {paused} requests are paused"
            reason, strategy = look.history.running_groups[group].reason, look.config.load_strategy
            return Step(group=group, is_merge=False, reason=reason, why=why, strategy=strategy)
    return None


def _relieve(look: Look, free: list[Group]) -> Step | None:
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
    return Step(group=group, is_merge=False, reason=Reason.LOAD, why=why, strategy=config.load_strategy)


def _end_of_reason(look: Look, free: list[Group]) -> Step | None:
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
                step = Step(group=group, is_merge=False, reason=reason, why=why, strategy=config.load_strategy)
        else:
            running_groups[group] = replace(running_groups[group], reason=Reason.LOAD)
    look.history = replace(look.history, running_groups=running_groups)
    return step


def _merge_idle(look: Look) -> Step | None:
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
        if load is None or not load.is_known or not look.is_free(goal.members) or not look.is_possible(goal):
            continue
        if config.load_strategy == SwitchStrategy.HARD and load.num_requests:
            continue  # it would pause requests for as long as the load is low
        parts = [g for g in view.groups_over(goal.members) if g in history.running_groups]
        if any(look.age_s(part) < config.min_dwell_s for part in parts):
            continue
        low_s = look.now_s - history.low_since_s[goal]
        why = f"load {load.load:.2f} < {config.merge_below:g} for {low_s:.1f} s"
        step = look.step_to(goal, Reason.LOAD, why, config.load_strategy)
        if step is not None:
            return step
    return None
