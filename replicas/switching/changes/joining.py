"""What a merge and a drop have in common: several groups become one."""

from collections.abc import Callable, Set

from pengserve.planners.taking_part import require_joining
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.engine.movers.reshard import Traveller
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.wiring import Wiring


def check_joining(member: Member, wiring: Wiring, plan: SwitchPlan) -> None:
    """Whether this member runs the part that the plan was made for, and can run the group.

    Raises:
        StepError, EngineError: why it cannot.
    """
    member.pool.get(wiring.spec_of(plan.group, plan.members).name)
    running = member.lanes.running
    is_waiting = running is not None and (running.is_exchanging or not running.is_settled)
    require_joining(plan, member.key, running.name if running is not None else "dp", is_waiting=is_waiting)
    member.lanes.registry.require(plan.group)


def brought(
    member: Member, plan: SwitchPlan, kept: frozenset[str] | None, stays: Callable[[Request], bool]
) -> list[Traveller]:
    """The requests whose KV goes along with this member.

    Args:
        kept: under sequential and soft, the ids that ran when the switch was asked for; what has begun since is
            recomputed, as the paper does.
    """
    rank, lane = plan.members.index(member.key), member.lanes.current
    member.lanes.dp.unpin()
    found = []
    for request in lane.carriable():
        if not stays(request) and (kept is None or request.request_id in kept):
            handoff = member.owner.handoff(request)
            if handoff is not None:
                traveller = Traveller(request.request_id, rank, [], handoff, is_parked=lane.is_parked(request))
                if lane is member.lanes.running:
                    traveller.part_ids = lane.block_ids(request.request_id)
                found.append(traveller)
    return found


def send_rest(member: Member, leader: InstanceKey, stays: Set[str] = frozenset()) -> int:
    """After a commit: what waits in `dp` goes to `leader`, from its tokens; how many requests that are."""
    dp = member.lanes.dp
    going = [request.request_id for request in dp.requests() if request.request_id not in stays]
    dp.release(going)
    member.owner.moved(going, leader, carried=False)
    return len(going)
