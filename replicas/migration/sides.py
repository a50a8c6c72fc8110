"""The group of this instance as one side of a migration, and who sends what between two sides."""

from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.engine.lanes.kv_shares import Flow, LaneKv, flows_between, shares_of
from pengserve.replicas.migration.messages import Side
from pengserve.replicas.switching.member import Member


def side_of(member: Member) -> Side:
    """The group that runs here; this instance alone in dp."""
    running = member.lanes.running
    return Side("dp", (member.key,)) if running is None else Side(running.shape, running.run.members)


def lane_kv(member: Member) -> LaneKv:
    """This member's share of the KV of the lane that runs here."""
    lanes = member.lanes
    return (lanes.running or lanes.dp).kv(lanes.dp_view())


def lane_name(member: Member) -> str:
    """On whose behalf transfers go: what they read and write ends with that lane."""
    running = member.lanes.running
    return "dp" if running is None else running.name


def flows(member: Member, source: Side, target: Side) -> list[Flow]:
    """Who sends whom which part of a request's KV. Ranks of a transfer: those of the source, then the target's.

    Raises:
        UnsupportedShapeError: a side has a shape that the model cannot have.
    """
    view, first = member.lanes.dp_view(), len(source.members)
    shares = [shares_of(side.shape, view.num_layers, view.layout.num_heads) for side in (source, target)]
    return [flow._replace(target=first + flow.target) for flow in flows_between(*shares)]


def followers(side: Side, key: InstanceKey) -> tuple[InstanceKey, ...]:
    """The members of `side` that instance `key` leads."""
    return side.members[1:] if side.leader == key else ()
