"""The routing table that follows from slots and layout. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pengserve.controller.slots import Slot
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.layout import Group, GroupKind, Layout
from pengserve.planners.types.snapshot import Address, LaneInfo, Route, RoutingTable


class Part(NamedTuple):
    """What one READY instance adds to the routing table. A tuple: a thousand of them are compared in each tick."""

    key: InstanceKey
    endpoint: str
    is_follower: bool  # it says that it executes another instance's steps; the layout may differ
    lanes: tuple[LaneInfo, ...]
    max_model_len: int  # in dp
    longest: int  # tokens a request may have in any of its shapes
    alone: Route  # to it, where it is alone
    address: Address


def part(slot: Slot) -> Part | None:
    """Where a slot takes requests: only READY ones do."""
    answer = slot.ready
    if answer is None or not answer.endpoint:
        return None
    key, endpoint = slot.key, answer.endpoint
    in_dp = answer.capacity.max_model_len if answer.capacity else 0
    lengths = [lane.capacity.max_model_len for lane in answer.lanes if lane.capacity]
    return Part(
        key=key,
        endpoint=endpoint,
        is_follower=answer.lane != "dp" and slot.lane != "" and f"@({key.instance_id}," not in slot.lane,
        lanes=answer.lanes,
        max_model_len=in_dp,
        longest=max([in_dp, *lengths]),
        alone=Route(
            key=key,
            endpoint=endpoint,
            members=(key.instance_id,),
            shape="dp",
            max_model_len=_length(answer.lanes, "dp", in_dp),
        ),
        address=Address(key=key, endpoint=endpoint),
    )


def are_alike(new: Part | None, old: Part | None, is_wide: bool) -> bool:
    """Whether both make the same routes in one layout; `is_wide` where that has the instance in a group of several.

    There, what it says of following is what the layout says already: each switch would call for a table anew.
    """
    if new is None or old is None:
        return new is old
    return new == (old._replace(is_follower=new.is_follower) if is_wide else old)


def table(
    before: RoutingTable, parts: Sequence[Part | None], layout: Layout, widest: Sequence[Group], *, is_draining: bool
) -> RoutingTable:
    """The next routing table.

    `widest` are the groups that the hardware allows. The longest request never falls: a cluster that lost an instance
    forms its widest shape again once the slot is filled, and a request may wait for that. Only tp groups count: a
    pipeline is formed where memory is short, and for no request that is too long.
    """
    routes = []
    known = {route.members: route for route in before.routes if len(route.members) > 1}
    for group in layout.groups:
        members = group.members
        leader = parts[members[0]]
        if leader is None:
            continue
        if len(members) == 1:
            if not leader.is_follower:  # it would have to refuse what is sent to it; its next answer clears this up
                routes.append(leader.alone)
        elif None not in _of(parts, members):
            routes.append(_wide_route(leader, group, known.get(members)))
    ready = [p for p in parts if p is not None]
    return RoutingTable(
        version=before.version.next,
        epoch=layout.epoch,
        routes=tuple(routes),
        is_draining=is_draining,
        addresses=tuple(p.address for p in ready),
        max_model_len=_longest(before.max_model_len, parts, widest),
    )


def difference(before: Sequence[Route], after: Sequence[Route]) -> dict[str, Any]:
    """What an event says of new routes: which are new and which have gone, as "7.1 tp2", not all that there are.

    Most of a thousand are the same objects: those cost nothing more.
    """
    kept = set(map(id, before)).intersection(map(id, after))
    old = {f"{route.key} {route.shape}": route for route in before if id(route) not in kept}
    new = {f"{route.key} {route.shape}": route for route in after if id(route) not in kept}
    return {
        "num_routes": len(after),
        "added": [name for name, route in new.items() if old.get(name) != route],
        "removed": [name for name, route in old.items() if new.get(name) != route],
    }


def _wide_route(leader: Part, group: Group, known: Route | None) -> Route:
    """The route to `group`; the one that is `known` where it is the same, since that is faster than to make another."""
    shape = group.shape
    length = _length(leader.lanes, shape, leader.max_model_len)
    if known is not None and (known.key, known.endpoint, known.shape, known.max_model_len) == (
        leader.key,
        leader.endpoint,
        shape,
        length,
    ):
        return known
    return replace(leader.alone, members=group.members, shape=shape, max_model_len=length)


def _longest(before: int, parts: Sequence[Part | None], widest: Sequence[Group]) -> int:
    """The longest request that there ever was a shape for: that of one instance, or of a group that can be formed."""
    ready = [p for p in parts if p is not None]
    if max((p.longest for p in ready), default=0) <= before:
        return before
    return max([before, *(_length(p.lanes, "dp", p.max_model_len) for p in ready), *_wide(parts, widest)])


def _wide(parts: Sequence[Part | None], groups: Sequence[Group]) -> list[int]:
    """The longest requests that groups can hold, of those whose members all have the lane."""
    lengths = []
    for group in (g for g in groups if g.kind is GroupKind.TP):
        shape, members = group.shape, _of(parts, group.members)
        lengths.append(min(_length(p.lanes, shape, p.max_model_len) if p is not None else 0 for p in members))
    return lengths


def _of(parts: Sequence[Part | None], members: Sequence[InstanceId]) -> list[Part | None]:
    return [parts[member] for member in members]


def _length(lanes: Sequence[LaneInfo], shape: str, in_dp: int) -> int:
    """Tokens a request may have in that shape; 0 where it is not known, or the shape cannot be built."""
    for lane in lanes:
        if lane.shape == shape:
            return lane.capacity.max_model_len if lane.capacity else 0
    return in_dp if shape == "dp" else 0
