"""What must hold before anything acts on a plan. Each violation is a sentence; no violation is an empty tuple."""

from collections.abc import Mapping

from pengserve.planners.columns import group_table, ready_instances
from pengserve.planners.load import fits_alone, formable_groups, lane_capacity
from pengserve.planners.stages import nests
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.layout import GroupKind
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot, InstanceState

ById = Mapping[InstanceId, InstanceSnapshot]
_END = {GroupKind.TP: "split", GroupKind.PP: "restore"}  # what must happen before its members are alone


def check_switch(plan: SwitchPlan, snapshot: ClusterSnapshot) -> tuple[str, ...]:
    """All laws that `plan` breaks on `snapshot`.

    A plan is for the layout's epoch, and its members are the READY lives of their slots, in no other switch. A merge or
    drop takes groups of the layout, dp ones or narrower ones of its kind that nest in the new one, whose lanes and
    communicators are ready. A split or restore ends a group of the layout, none of whose requests is too long for what
    it ends in; on a restore, all of them together must fit too, and narrower pipelines that it ends in nest in it and
    are ready.
    """
    found: list[str] = []
    if plan.epoch != snapshot.epoch:
        found.append(f"the plan is for epoch {plan.epoch}, the layout is at {snapshot.epoch}: plan again")
    members = plan.group.members
    ready = ready_instances(snapshot.instances)
    by_id: ById = ready
    if not all(member in ready for member in members):
        by_id = {i.key.instance_id: i for i in snapshot.instances}
    for key in plan.members:
        found += _check_member(key, by_id.get(key.instance_id))
    if len(set(plan.members)) != len(plan.members):
        found.append(f"{plan.group} has an instance twice")
    under_way = [other for other in snapshot.switching if not plan.is_apart(other)]
    found += [f"{other.verb} {other.group} is under way with some of its members: wait for it" for other in under_way]
    found += _check_merge(plan, snapshot, by_id) if plan.is_merge else _check_split(plan, snapshot, by_id)
    return tuple(found)


def _check_member(key: InstanceKey, instance: InstanceSnapshot | None) -> list[str]:
    if instance is None:
        return [f"there is no instance {key.instance_id}"]
    if instance.key != key:
        return [f"instance {key} was replaced by {instance.key}"]
    if instance.state is not InstanceState.READY:
        return [f"instance {key} is {instance.state}, not ready"]
    return []


def _check_merge(plan: SwitchPlan, snapshot: ClusterSnapshot, by_id: ById) -> list[str]:
    found: list[str] = []
    if plan.group not in formable_groups(snapshot.groups):
        found.append(f"{plan.group} cannot be formed now: its communicators are not ready")
    current = group_table(snapshot.layout.groups).group_of
    for member in plan.group.members:
        group = current.get(member)
        if group is None:
            found.append(f"instance {member} is in no group of the layout")
        elif group in plan.parts:
            pass
        elif group.kind is GroupKind.DP:
            found.append(f"instance {member} is alone, and the plan is for what it ran with others: plan again")
        else:
            found.append(f"instance {member} is in {group}: {_END[group.kind]} that first")
        instance = by_id.get(member)
        if instance is not None and lane_capacity(instance, plan.group.shape) is None:
            found.append(f"instance {member} has no {plan.group.shape} lane")
    return found + _check_parts(plan)


def _check_parts(plan: SwitchPlan) -> list[str]:
    if nests([part.degree for part in plan.parts]):
        return []
    return [f"{' '.join(map(str, plan.parts))} do not nest in {plan.group}: each must be a half of it, or of a half"]


def _check_split(plan: SwitchPlan, snapshot: ClusterSnapshot, by_id: ById) -> list[str]:
    if plan.group not in snapshot.layout.groups:
        return [f"{plan.group} is not in the layout"]
    leader = by_id.get(plan.group.leader)
    longest = 0 if leader is None else leader.stats.longest_tokens
    found = _check_parts(plan) if plan.group.kind is GroupKind.PP else []
    for part in plan.parts:
        if part.kind is not GroupKind.DP and part not in formable_groups(snapshot.groups):
            found.append(f"{part} cannot be formed now: its communicators are not ready")
        for member in part.members:
            lane = lane_capacity(by_id.get(member), part.shape)
            who = f"instance {member} alone" if part.kind is GroupKind.DP else str(part)
            if lane is None and member in by_id:
                found.append(f"instance {member} has no {part.shape} lane to go back to")
            elif lane is not None and longest > lane.max_model_len:
                found.append(
                    f"a request of {longest} tokens runs in {plan.group}, and {who} holds "
                    f"{lane.max_model_len}: wait until it has ended"
                )
    if (
        plan.group.kind is GroupKind.PP
        and not found
        and leader is not None
        and not fits_alone(plan.group, by_id, parts=plan.parts)
    ):
        found.append(
            f"{plan.group} holds {leader.stats.kv_blocks_used} blocks, for which its members may not have room: "
            "wait until requests have ended"
        )
    return found
