"""What the live page shows of a snapshot, as JSON data, and what changed from one to the next. Pure.

    view      {app, time_s, epoch, routes, policy, groups, formable, switch, switching, instances: {"0": {...}}}
    delta     the same, with what is new alone; of each instance its new fields; `gone` names those that went

All sizes are bytes, all totals grow within one life of an instance. There is no text of any request in it.
"""

from collections.abc import Mapping
from typing import Any

from pengserve.cluster.memory_parts import host_parts, memory_parts
from pengserve.planners.types.codec import to_data
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot, LayoutPolicy, SwitchRecord

View = dict[str, Any]

MAX_FORMABLE = 64  # names of groups that the page offers; any other may be typed

STORY = frozenset(
    {
        EventKind.PLAN_DECIDED,
        EventKind.PLAN_OUTCOME,
        EventKind.POLICY_CHANGED,
        EventKind.TRANSITION_START,
        EventKind.TRANSITION_END,
        EventKind.TRANSITION_ERROR,
        EventKind.INSTANCE_READY,
        EventKind.INSTANCE_ERROR,
        EventKind.INSTANCE_LOST,
        EventKind.INSTANCE_DRAIN_START,
        EventKind.INSTANCE_DRAIN_END,
        EventKind.INSTANCE_DRAIN_ERROR,
        EventKind.INSTANCE_UNDRAINED,
        EventKind.CONTROLLER_RECOVERED,
        EventKind.CONTROLLER_STOP,
    }
)
"""Kinds of events that say why the cluster is as it is."""


def view_of(snapshot: ClusterSnapshot) -> View:
    """The whole page's data."""
    group_of = {member: group for group in snapshot.layout.groups for member in group.members}
    by_id = {instance.instance_id: instance for instance in snapshot.instances}
    instances = {}
    for instance in snapshot.instances:
        group = group_of.get(instance.instance_id)
        leader = by_id.get(group.leader, instance) if group is not None else instance
        instances[str(instance.instance_id)] = _instance(instance, leader, group) | {
            "leaving": instance.instance_id in snapshot.leaving
        }
    return {
        "app": snapshot.app,
        "time_s": round(snapshot.time_s, 3),
        "epoch": snapshot.epoch,
        "routes": str(snapshot.routing_version),
        "policy": _policy(snapshot.policy),
        "groups": [_group(group) for group in snapshot.layout.groups if group.kind is not GroupKind.DP],
        "formable": [str(group) for group in snapshot.groups[:MAX_FORMABLE]],
        "switch": _switch(snapshot.last_switch),
        "switching": [
            {"verb": plan.verb, "group": str(plan.group), "members": list(plan.group.members)}
            for plan in snapshot.switching
        ],
        "instances": instances,
    }


def delta_of(before: View, after: View) -> View:
    """What `after` has that `before` has not. `apply_delta(before, delta)` is `after`."""
    delta = {name: value for name, value in after.items() if name != "instances" and before.get(name) != value}
    old, new = before["instances"], after["instances"]
    changed = {}
    for name, instance in new.items():
        known = old.get(name, {})
        if fields := {field: value for field, value in instance.items() if known.get(field, _ABSENT) != value}:
            changed[name] = fields
    if changed:
        delta["instances"] = changed
    if gone := sorted(old.keys() - new.keys(), key=int):
        delta["gone"] = gone
    return delta


def apply_delta(before: View, delta: Mapping[str, Any]) -> View:
    """The view that follows `before`, as the page computes it."""
    after = before | {name: value for name, value in delta.items() if name not in ("instances", "gone")}
    instances = {name: i for name, i in before["instances"].items() if name not in delta.get("gone", ())}
    for name, fields in delta.get("instances", {}).items():
        instances[name] = instances.get(name, {}) | fields
    return after | {"instances": instances}


_ABSENT = object()


def _instance(instance: InstanceSnapshot, leader: InstanceSnapshot, group: Group | None) -> dict[str, Any]:
    stats = instance.stats
    weights, kv, kv_used = memory_parts(instance, leader)
    host, host_used, _ = host_parts(instance)
    leads = group is None or group.leader == instance.instance_id
    return {
        "key": str(instance.key),
        "state": instance.state.value,
        "shape": stats.shape if group is None else group.shape,
        "leader": leader.instance_id,
        "device": instance.device.device,
        "node": instance.device.node_ip,
        "pid": instance.device.pid,
        "phase": instance.phase,
        "failure": instance.failure,
        "weights": weights,
        "kv": kv,
        "kv_used": kv_used,
        "queued_tokens": stats.queued_tokens,
        "kv_tokens": stats.kv_blocks_used * stats.block_size if leads else 0,
        "kv_tokens_total": stats.kv_blocks_total * stats.block_size if leads else 0,
        "host": host,
        "host_used": host_used,
        "running": stats.num_running,
        "waiting": stats.num_waiting - stats.num_parked,
        "parked": stats.num_parked,
        "paused": stats.num_paused,
        "moved": stats.total_migrated,
        "preempted": stats.total_preemptions,
        "prompt_tokens": stats.total_prompt_tokens,
        "output_tokens": stats.total_generated_tokens,
    }


def _group(group: Group) -> dict[str, Any]:
    return {"name": str(group), "shape": group.shape, "members": list(group.members)}


def _policy(policy: LayoutPolicy) -> dict[str, Any]:
    target = " ".join(str(group) for group in policy.target if group.kind is not GroupKind.DP)
    return {"is_auto": policy.is_auto, "target": target or ("dp" if policy.target else "")}


def _switch(record: SwitchRecord | None) -> dict[str, Any] | None:
    data: dict[str, Any] | None = to_data(record)
    return data
