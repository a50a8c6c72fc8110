"""From a wanted group to the one switch that comes next."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pengserve.planners.columns import group_table
from pengserve.planners.load import ClusterView, fits_alone, lane_capacity
from pengserve.planners.stages import nests
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind, alone
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot
from pengserve.planners.types.strategy import SwitchStrategy


def parts_of(group_of: Mapping[InstanceId, Group], group: Group) -> tuple[Group, ...]:
    """The groups that `group` can be formed of as they are: instances alone, and narrower ones of its kind that nest in
    it. Empty where there are none such.

    Args:
        group_of: the layout's group of each member.
    """
    found: list[Group] = []
    start = 0
    while start < group.degree:
        part = group_of.get(group.members[start])
        if part is None or part.kind not in (GroupKind.DP, group.kind) or part == group:
            return ()
        if part.members != group.members[start : start + part.degree]:
            return ()
        found.append(part)
        start += part.degree
    return tuple(found) if nests([part.degree for part in found]) else ()


def can_merge(view: ClusterView, group: Group) -> bool:
    """Whether `group` can be formed now: of what its members run, nothing of theirs paused (it would have to wait for
    the wider group to end), lanes and communicators ready.
    """
    return (
        bool(parts_of(view.group_of, group))
        and view.can_form(group)
        and not view.num_paused(group)
        and all(lane_capacity(view.instances[m], group.shape) is not None for m in group.members)
    )


def can_split(view: ClusterView, group: Group, parts: Sequence[Group] = ()) -> bool:
    """Whether `group`, of the layout, can end now: each of its requests fits into any of its `parts`, which are its
    members alone where nothing else is said.

    A pipeline holds more than its parts do, so there all of its requests together must fit too. Parts that are
    pipelines need their lanes and communicators.
    """
    parts = parts or alone(group.members)
    if not all(part.kind is GroupKind.DP or view.can_form(part) for part in parts):
        return False
    most_tokens = min(view.max_tokens(part, part.shape) for part in parts)
    if most_tokens <= 0 or view.longest_tokens(group) > most_tokens:
        return False
    return group.kind is not GroupKind.PP or fits_alone(group, view.instances, parts=parts)


def halves_of(group: Group) -> tuple[Group, ...]:
    """The two pipelines that `group` can be cut into; empty where it is too narrow."""
    middle, rest = divmod(group.degree, 2)
    if group.kind is not GroupKind.PP or rest or middle < 2:
        return ()
    return tuple(Group(kind=GroupKind.PP, members=half) for half in (group.members[:middle], group.members[middle:]))


def split_first(view: ClusterView, goal: Group) -> tuple[Group, ...]:
    """Tp groups of the layout that must end before `goal` can be formed: none where it can be formed of them."""
    found = _tp_over(view, goal)
    return found if found and not can_merge(view, goal) else ()


def _tp_over(view: ClusterView, goal: Group) -> tuple[Group, ...]:
    return tuple(g for g in view.groups_over(goal.members) if g.kind is GroupKind.TP and g != goal)


def next_step(view: ClusterView, goal: Group, may_split: Callable[[Group], bool]) -> tuple[Group, bool] | None:
    """The group to merge (True) or split (False) next, to get to `goal`; None when there, or while it must wait.

    Narrower groups of its kind become a part of it as they are; where they cannot, tp groups end first. A pipeline in
    the way is waited for: it stands because memory is short, and ends when that is over.
    """
    if can_merge(view, goal):
        return goal, True
    return next(((group, False) for group in _tp_over(view, goal) if may_split(group)), None)


def make_plan(
    snapshot: ClusterSnapshot,
    instances: Mapping[InstanceId, InstanceSnapshot],
    group: Group,
    is_merge: bool,
    strategy: SwitchStrategy,
    why: str,
    parts: Sequence[Group] = (),
) -> SwitchPlan:
    """The plan for one step on `snapshot`, of whose `instances` it needs the members.

    A group begins of what its members run. It ends in `parts`; without them, each member is alone.

    Its id tells epoch, step and group. Where another switch of the same epoch may have been aborted it also tells the
    layout's age, so that a second try has an id of its own.
    """
    if is_merge:
        parts = parts_of(group_table(snapshot.layout.groups).group_of, group)
    plan = SwitchPlan(
        plan_id="",
        epoch=snapshot.epoch,
        group=group,
        members=tuple(instances[m].key for m in group.members),
        is_merge=is_merge,
        parts=tuple(parts),
        strategy=strategy,
        why=why,
    )
    plan_id = f"{snapshot.epoch}:{plan.verb}:{group}"
    last = snapshot.last_switch
    if last is not None and (last.phase != "done" or last.plan_id.startswith(f"{snapshot.epoch}:")):
        plan_id += f"+{snapshot.time_s - snapshot.layout_since_s:.3f}s"
    return replace(plan, plan_id=plan_id)
