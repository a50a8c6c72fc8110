"""What an instance's memory holds now, by its shape: weights, room for KV, and KV. For people and for metrics."""

from collections.abc import Sequence

from pengserve.planners.load import lane_capacity
from pengserve.planners.types.layout import Group, GroupKind, degree_of
from pengserve.planners.types.snapshot import InstanceSnapshot


def memory_parts(instance: InstanceSnapshot, leader: InstanceSnapshot) -> tuple[int, int, int]:
    """Bytes of an instance's device: (weights, KV that can be, KV that is). A stage of a pipeline has its share."""
    capacity, shape = instance.capacity, leader.stats.shape
    if capacity is None:
        return 0, 0, 0
    lane, stages = capacity, 1
    if shape.startswith(GroupKind.PP):
        lane, stages = lane_capacity(instance, shape) or capacity, degree_of(shape)
    if instance.stats.host_blocks and stages == 1:
        device = (instance.stats.device_blocks, instance.stats.device_blocks_used)
        kv_bytes, used_bytes = (num_blocks * capacity.bytes_per_block for num_blocks in device)
        return capacity.weight_bytes, kv_bytes, used_bytes
    used_bytes = leader.stats.kv_blocks_used * capacity.bytes_per_block
    kv_bytes = lane.num_blocks * capacity.bytes_per_block
    return capacity.weight_bytes // stages, kv_bytes // stages, used_bytes // stages


def host_parts(instance: InstanceSnapshot) -> tuple[int, int, int]:
    """Of an instance's host tier: (bytes that can be, bytes that are, tokens that can be). Zeros where it has none."""
    capacity, stats = instance.capacity, instance.stats
    if capacity is None or not stats.host_blocks:
        return 0, 0, 0
    # A stage's rows have its own layers alone.
    stages = degree_of(stats.shape) if stats.shape.startswith(GroupKind.PP) and not stats.is_follower else 1
    size = capacity.bytes_per_block // stages
    return stats.host_blocks * size, stats.host_blocks_used * size, stats.host_blocks * capacity.block_size


def leader_of(
    instances: Sequence[InstanceSnapshot], instance: InstanceSnapshot, group: Group | None
) -> InstanceSnapshot:
    """The instance that schedules for this one; itself where it is alone."""
    leader = group.leader if group is not None else instance.instance_id
    return next((i for i in instances if i.instance_id == leader), instance)
