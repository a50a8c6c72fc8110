"""How the layout goes on: by committed switches, and by what the instances say they run. Pure.

The instances are the truth. A switch is committed by its leader alone, and survivors of a broken group fall back to dp
by themselves; so a layout that disagrees with its instances is the layout's mistake:

    a member of a group is not READY, or runs something else        the group dissolves into dp groups
    all members of a tp or pp group say that they run it            it is a group
    an instance has committed an epoch above the layout's           the layout's next epoch is above that

Answers from before a switch say nothing about after it (`Slot.lane` is empty then), and while a switch is under way
nothing follows from what its members run: the switch's own end tells. Switches of other groups may end meanwhile, so
that the layout's epoch may be more than one above the epoch that a plan was made for.
"""

from collections.abc import Collection, Iterable, Sequence

from pengserve.controller.events import EventDraft
from pengserve.controller.slots import Slot
from pengserve.planners.columns import group_table
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.ids import Epoch, InstanceId
from pengserve.planners.types.layout import Group, GroupKind, Layout, alone
from pengserve.planners.types.plans import SwitchPlan

_SHOWN_GROUPS = 16
_SHOWN_REASONS = 4
_ALONE = ("", "dp")  # what most slots run: no group of several


def follow(layout: Layout, slots: Sequence[Slot], busy: Collection[InstanceId] = ()) -> tuple[Layout, str]:
    """The layout as the instances have it, and why it is another one; the same object where it is not.

    `busy` are the members of switches under way.
    """
    of_kind = group_table(layout.groups).of_kind
    wide = [*of_kind[GroupKind.TP], *of_kind[GroupKind.PP]]
    broken = {group: why for group in wide if (why := _break(group, slots, busy))}
    claimed = _claimed(wide, slots, busy)
    told = [slot.snapshot.epoch for slot in slots if slot.snapshot is not None and slot.key.instance_id not in busy]
    newest = max(told, default=layout.epoch)
    reasons = [f"{group} has ended: {why}" for group, why in broken.items()]
    reasons += [f"{group} is what its members run" for group in claimed]
    if newest > layout.epoch:
        reasons.append("an instance has committed a newer epoch")
    if not reasons:
        return layout, ""
    groups = [part for group in layout.groups for part in (alone(group.members) if group in broken else (group,))]
    for group in claimed:
        groups = [other for other in groups if other.leader not in group.members] + [group]
    more = [f"and {len(reasons) - _SHOWN_REASONS} more"] if len(reasons) > _SHOWN_REASONS else []
    why = "; ".join(reasons[:_SHOWN_REASONS] + more)
    return _layout(max(layout.epoch, newest) + 1, groups), why


def committed(layout: Layout, slots: Sequence[Slot], plan: SwitchPlan, epoch: Epoch) -> Layout | None:
    """The layout after `plan`, whose leader has told the `epoch` it led to.

    None where a member has ended, or the layout has changed under the plan: then what the members say counts.
    """
    if any(slots[key.instance_id].key != key or slots[key.instance_id].ready is None for key in plan.members):
        return None
    if not stands(layout, plan.before):
        return None
    left = {part.leader for part in plan.before}
    rest = [group for group in layout.groups if group.members[0] not in left]
    return _layout(max(epoch, layout.epoch + 1), [*rest, *plan.after])


def stands(layout: Layout, groups: Iterable[Group]) -> bool:
    """Whether all of `groups` are in the layout."""
    group_of = group_table(layout.groups).group_of
    return all(group_of.get(group.leader) == group for group in groups)


def changed(layout: Layout, why: str) -> EventDraft:
    """The event of a new epoch."""
    data = {"epoch": layout.epoch, "groups": describe(layout)}
    return EventDraft(kind=EventKind.LAYOUT_CHANGED, why=why, data=data)


def describe(layout: Layout) -> str:
    """The groups for people, wide ones first, and not all of a thousand."""
    groups = sorted(layout.groups, key=lambda group: (-len(group.members), group.leader))
    names = [str(group) for group in groups[:_SHOWN_GROUPS]]
    more = [f"and {len(groups) - _SHOWN_GROUPS} more"] if len(groups) > _SHOWN_GROUPS else []
    return ", ".join(names + more)


def _break(group: Group, slots: Sequence[Slot], busy: Collection[InstanceId]) -> str:
    """Why a group of the layout is none any more; empty where it is one."""
    name = str(group)
    for member in group.members:
        slot = slots[member]
        if slot.ready is None:
            return f"instance {slot.key} is {slot.state.value}"
        if slot.lane not in ("", name) and member not in busy:
            return f"instance {slot.key} runs {slot.lane}"
    return ""


def _claimed(wide: Sequence[Group], slots: Sequence[Slot], busy: Collection[InstanceId]) -> list[Group]:
    """Tp and pp groups that are not in `wide`, those of the layout, and that all their members say they run."""
    known, members_of = {*_ALONE, *map(str, wide)}, dict[str, set[InstanceId]]()
    for slot in [slot for slot in slots if slot.lane not in known]:
        if not slot.lane.startswith("dp") and slot.key.instance_id not in busy:
            members_of.setdefault(slot.lane, set()).add(slot.key.instance_id)
    groups = [group for lane in members_of if (group := _parse(lane)) is not None]
    return [group for group in groups if set(group.members) == members_of[str(group)]]


def _parse(lane: str) -> Group | None:
    """The group that an instance names; None where it is no group that this version knows."""
    try:
        group = Group.parse(lane)
    except ValueError:
        return None
    return group if str(group) == lane else None


def _layout(epoch: int, groups: Iterable[Group]) -> Layout:
    return Layout(epoch=Epoch(epoch), groups=tuple(sorted(groups, key=lambda group: group.members[0])))
