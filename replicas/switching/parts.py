"""The parts of a pipeline that a plan is about."""

from pengserve.planners.stages import Parts
from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.switching.member import Member


def parts_of(member: Member, plan: SwitchPlan) -> Parts:
    """The parts that the pipeline is formed of, or ends in."""
    assert member.lanes.dp.memory is not None
    num_layers = member.lanes.dp.memory.layers.sizes.num_layers
    return Parts(num_layers, tuple(part.degree for part in plan.parts))
