"""The routing table that follows from slots and layout. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from pengserve.controller.slots import Slot
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.layout import Group, GroupKind, Layout
from pengserve.planners.types.snapshot import Address, LaneInfo, Route, RoutingTable


class Part(NamedTuple):
    """What one READY instance adds to the routing table. A tuple: each tick makes and compares one of each instance."""

    key: InstanceKey
    endpoint: str
    is_follower: bool  # it says that it executes another instance's steps, whatever the layout says
    lanes: tuple[LaneInfo, ...]
    max_model_len: int  # in dp


def part(slot: Slot) -> Part | None:
    """Where a slot takes requests: only READY ones do."""
    answer = slot.ready
    if answer is None or not answer.endpoint:
        return None
    return Part(
        key=slot.key,
        endpoint=answer.endpoint,
        is_follower=answer.lane != "dp" and slot.lane != "" and f"@({slot.key.instance_id}," not in slot.lane,
        lanes=answer.lanes,
        max_model_len=answer.capacity.max_model_len if answer.capacity else 0,
    )


def table(
    before: RoutingTable, parts: Sequence[Part | None], layout: Layout, widest: Sequence[Group], *, is_draining: bool
) -> RoutingTable:
    """The next routing table.

    `widest` are the groups that the hardware allows. The longest request never falls: a cluster that lost an instance
    forms its widest shape again once the slot is filled, and a request may wait for that. Only tp groups count: a
    pipeline is formed where memory is short, and for no request that is too long.
    """
    routes = []
    for group in layout.groups:
        leader = parts[group.leader]
        if leader is None or any(parts[member] is None for member in group.members):
            continue
        if group.kind is GroupKind.DP and leader.is_follower:
            continue  # it would have to refuse what is sent to it; its next answer clears this up
        routes.append(
            Route(
                key=leader.key,
                endpoint=leader.endpoint,
                members=group.members,
                shape=group.shape,
                max_model_len=_max_model_len(leader, group.shape),
            )
        )
    ready = [p for p in parts if p is not None]
    return RoutingTable(
        version=before.version + 1,
        epoch=layout.epoch,
        routes=tuple(routes),
        is_draining=is_draining,
        addresses=tuple(Address(key=p.key, endpoint=p.endpoint) for p in ready),
        max_model_len=max([before.max_model_len, *(_max_model_len(p, "dp") for p in ready), *_wide(parts, widest)]),
    )


def _wide(parts: Sequence[Part | None], groups: Sequence[Group]) -> list[int]:
    """The longest requests that groups can hold, of those whose members all have the lane."""
    lengths = []
    for group in (g for g in groups if g.kind is GroupKind.TP):
        of_members = [_max_model_len(p, group.shape) if p is not None else 0 for p in _of(parts, group.members)]
        lengths.append(min(of_members))
    return lengths


def _of(parts: Sequence[Part | None], members: Sequence[InstanceId]) -> list[Part | None]:
    return [parts[member] for member in members]


def _max_model_len(part: Part, shape: str) -> int:
    """Tokens a request may have in that shape; 0 where it is not known, or the shape cannot be built."""
    for lane in part.lanes:
        if lane.shape == shape:
            return lane.capacity.max_model_len if lane.capacity else 0
    return part.max_model_len if shape == "dp" else 0
