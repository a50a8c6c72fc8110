"""What a split and a restore have in common: one group ends in its parts."""

from pengserve.planners.stages import stage_layers
from pengserve.planners.types.errors import StepError
from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.switching.member import Member


def check_leaving(member: Member, plan: SwitchPlan) -> None:
    """Whether this member runs the group, and every request fits where it may go.

    Raises:
        StepError: why it cannot leave.
    """
    lane = member.lanes.running
    if lane is None or lane.name != str(plan.group):
        raise StepError(f"instance {member.key} does not run {plan.group}")
    if member.key != plan.leader:
        return
    if lane.is_exchanging:
        raise StepError(f"{lane.name} still waits for KV or memory since its drop; restore it when that has come")
    limit = _most_tokens(member, plan)
    for request in lane.requests():
        if min(request.num_prompt_tokens + request.max_tokens, lane.capacity.max_model_len) > limit:
            raise StepError(
                f"request {request.request_id} may grow to {request.num_prompt_tokens + request.max_tokens} tokens and"
                f" {min(plan.parts, key=lambda part: part.degree)} holds {limit}; wait until it has ended"
            )


def _most_tokens(member: Member, plan: SwitchPlan) -> int:
    """Most tokens that a request can have in any of the parts that the group ends in."""
    dp, fewest = member.lanes.dp, min(part.degree for part in plan.parts)
    if fewest == 1:
        return dp.capacity.max_model_len
    assert dp.memory is not None
    sizes = dp.memory.layers.sizes
    return sizes.num_pipeline_blocks(stage_layers(sizes.num_layers, fewest)) * dp.capacity.block_size
