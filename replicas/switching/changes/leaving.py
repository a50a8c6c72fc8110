"""What changes have in common by which a group ends."""

from collections.abc import Iterator

from pengserve.planners.stages import stage_layers
from pengserve.planners.taking_part import require_leaving
from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.engine.groups.group_lane import GroupLane
from pengserve.replicas.engine.groups.tp_lane import TpLane
from pengserve.replicas.engine.instance_lanes import Lanes
from pengserve.replicas.switching.member import Member


def check_leaving(member: Member, plan: SwitchPlan) -> None:
    """Whether this member runs the group, and every request fits where it may go.

    Raises:
        StepError: why it cannot leave.
    """
    lane, leads = member.lanes.running, member.key == plan.leader
    require_leaving(
        plan,
        member.key,
        lane.name if lane is not None else "dp",
        is_waiting=lane is not None and leads and lane.is_exchanging,
        requests=_sizes(lane) if lane is not None and leads else (),
        limit=lambda: _most_tokens(member, plan),
    )


def leave_group(lanes: Lanes, lane: TpLane) -> None:
    """This member leaves a tensor-parallel group that has no requests any more: all blocks go back to `dp`."""
    lane.forget(lane.known_ids())
    lanes.leave()
    lanes.leases.reclaim(lane, lane.table.leased())
    if lane.leads:
        lane.shrink_all()


def _sizes(lane: GroupLane) -> Iterator[tuple[str, int]]:
    """Ids of its requests, and tokens that they may grow to."""
    longest = lane.capacity.max_model_len
    return ((r.request_id, min(r.num_prompt_tokens + r.max_tokens, longest)) for r in lane.requests())


def _most_tokens(member: Member, plan: SwitchPlan) -> int:
    """Most tokens that a request can have in any of the parts that the group ends in."""
    dp, fewest = member.lanes.dp, min(part.degree for part in plan.parts)
    if fewest == 1:
        return dp.capacity.max_model_len
    assert dp.memory is not None
    sizes = dp.memory.layers.sizes
    return sizes.num_pipeline_blocks(stage_layers(sizes.num_layers, fewest)) * dp.capacity.block_size
