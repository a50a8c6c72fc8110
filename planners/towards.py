"""The way to a layout that somebody asked for."""

from collections.abc import Collection

from pengserve.planners.load import ClusterView
from pengserve.planners.steps import can_merge, can_split, is_backing_off, make_plan, parts_of
from pengserve.planners.types.layout import Group, GroupKind, alone
from pengserve.planners.types.plans import SwitchPlan, SwitchStrategy
from pengserve.planners.types.snapshot import ClusterSnapshot


def plan_towards(
    snapshot: ClusterSnapshot, target: tuple[Group, ...], strategy: SwitchStrategy, why: str
) -> SwitchPlan | None:
    """The next switch on the way to `target`; None when there, or while a step must wait.

    What `target` does not name is alone. Groups end before others begin, but a pipeline that is wanted wider grows as
    it is. A split waits for a request that is too long
    for one instance, a restore also until the members have room for all that runs; a merge or drop for communicators
    and for paused requests to go on. Whatever the `strategy`, drops and restores carry: that is what they are for.
    """
    if is_backing_off(snapshot):
        return None
    view = ClusterView.of(snapshot, busy_requests=1)
    wanted = {group for group in target if group.kind is not GroupKind.DP}
    standing = [g for g in snapshot.layout.groups if g.kind is not GroupKind.DP and g.leader in view.loads]
    ends = [g for g in standing if g not in wanted and not _grows(g, wanted) and can_split(view, g)]
    begins = [g for g in sorted(wanted.difference(standing), key=lambda g: g.members) if can_merge(view, g)]
    for group in (ends or begins)[:1]:
        how = strategy if group.kind is GroupKind.TP else SwitchStrategy.CARRY
        return make_plan(snapshot, view.instances, group, not ends, how, why)
    return None


def _grows(group: Group, wanted: Collection[Group]) -> bool:
    """Whether a pipeline becomes a part of a wider one that is wanted."""
    wide = next((w for w in wanted if w.kind is GroupKind.PP and group.leader in w.members), None)
    if wide is None or group.kind is not GroupKind.PP:
        return False
    group_of = dict.fromkeys(group.members, group)
    others = {m: alone([m])[0] for m in wide.members if m not in group_of}
    return bool(parts_of(group_of | others, wide))
