"""The switches that lead to a layout that a user asked for."""

from collections.abc import Collection

from pengserve.planners.groups import complete
from pengserve.planners.load import ClusterView
from pengserve.planners.stages import nests
from pengserve.planners.steps import can_merge, can_split, make_plan, parts_of
from pengserve.planners.types.layout import Group, GroupKind, alone
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import ClusterSnapshot
from pengserve.planners.types.strategy import SwitchStrategy


def plan_pinned(
    snapshot: ClusterSnapshot, target: tuple[Group, ...], strategy: SwitchStrategy, why: str
) -> SwitchPlan | None:
    """The next switch on the way to `target`; None when there, or while each step must wait.

    It has no member in common with those under way, or that were aborted a moment ago.

    What `target` does not name is alone. Groups end before others begin, but one that is wanted wider grows as it is,
    and a pipeline that is wanted narrower is cut. A split waits for a request that is too long for one instance, a
    restore also until the members have room for all that runs; a merge or drop for communicators and for paused
    requests to go on. Drops and restores always carry, also where `strategy` is another.
    """
    view = ClusterView.of(snapshot, busy_requests=1)
    busy = snapshot.busy
    wanted = {group for group in target if group.kind is not GroupKind.DP}
    running_groups = [g for g in snapshot.layout.groups if g.kind is not GroupKind.DP and g.leader in view.loads]
    for group in running_groups:
        if group not in wanted and busy.isdisjoint(group.members) and not _grows(view, group, wanted):
            parts = _parts(group, wanted)
            if can_split(view, group, parts):
                return make_plan(snapshot, view.instances, group, False, _how(group, strategy), why, parts)
    for group in sorted(wanted.difference(running_groups), key=lambda g: g.members):
        if busy.isdisjoint(group.members) and can_merge(view, group):
            return make_plan(snapshot, view.instances, group, True, _how(group, strategy), why)
    return None


def _how(group: Group, strategy: SwitchStrategy) -> SwitchStrategy:
    return strategy if group.kind is GroupKind.TP else SwitchStrategy.CARRY


def _parts(group: Group, wanted: Collection[Group]) -> tuple[Group, ...]:
    """What a group ends in on the way: a pipeline in the narrower ones that are wanted, where they nest in it."""
    narrower = [w for w in wanted if w.kind is GroupKind.PP and set(w.members) < set(group.members)]
    parts = complete(narrower if group.kind is GroupKind.PP else (), group.members)
    is_tiled = tuple(member for part in parts for member in part.members) == group.members
    return parts if is_tiled and nests([part.degree for part in parts]) else ()


def _grows(view: ClusterView, group: Group, wanted: Collection[Group]) -> bool:
    """Whether a group becomes a part of a wider one that is wanted. Where requests pause in it, it must end."""
    wide = next((w for w in wanted if w.kind is group.kind and group.leader in w.members), None)
    if wide is None or view.num_paused(group):
        return False
    group_of = dict.fromkeys(group.members, group)
    others = {m: alone([m])[0] for m in wide.members if m not in group_of}
    return bool(parts_of(group_of | others, wide))
