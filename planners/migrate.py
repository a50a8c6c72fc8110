"""Which requests go to which instance: from one that is being emptied, and from full ones to free ones. Pure."""

from collections.abc import Mapping, Sequence

from pengserve.planners.types.config import MigrateConfig
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.snapshot import InstanceSnapshot, InstanceStats
from pengserve.planners.types.units import blocks_for


def plan_evacuation(
    source: InstanceSnapshot, targets: Sequence[InstanceSnapshot], *, name: str, must_leave: bool
) -> tuple[Migrate, ...]:
    """One order for each target that has room, the freest first; ids begin with `name`.

    Each target gets a share of the source's KV by its free blocks, and never more than it has free. The last one may
    get all that it has room for: requests grow, and prefixes that they share count once in what the source holds. Where
    requests `must_leave`, there is an order also where no target has room: what cannot move is sent again from its
    tokens.
    """
    free = {target.key: _free_tokens(target) for target in targets}
    total = sum(free.values())
    wanted = source.stats.kv_blocks_used * source.stats.block_size
    by_room = sorted(free, key=lambda key: (-free[key], key))
    chosen = [key for key in by_room if free[key] > 0] or (by_room[:1] if must_leave else [])
    last = len(chosen) - 1
    return tuple(
        Migrate(
            order_id=f"{name}-{index}",
            source=source.key,
            target=key,
            max_tokens=free[key] if wanted >= total or index == last else -(-wanted * free[key] // total),
            empties=True,
            must_leave=must_leave and index == last,
        )
        for index, key in enumerate(chosen)
    )


def _free_tokens(target: InstanceSnapshot) -> int:
    """Tokens of KV that it has room for, beyond what its own queue will need."""
    stats = target.stats
    return max(0, (stats.kv_blocks_total - stats.kv_blocks_used) * stats.block_size - stats.queued_tokens)


def plan_rebalance(instances: Sequence[InstanceSnapshot], config: MigrateConfig, *, name: str) -> tuple[Migrate, ...]:
    """One order for each pair of a full and a free instance; ids begin with `name`.

    A pair moves what makes their shares of KV equal, and half of what is free at most: so it never changes roles.
    """
    of = {instance.key: instance for instance in instances if instance.stats.kv_blocks_total}
    orders = []
    for source, target in pair_up({key: _load(instance) for key, instance in of.items()}, config):
        (used, total), (others, room) = _tokens(of[source].stats), _tokens(of[target].stats)
        tokens = min((used * room - others * total) // (total + room), (room - others) // 2)
        if tokens > 0:
            orders.append(Migrate(order_id=f"{name}-{source}", source=source, target=target, max_tokens=tokens))
    return tuple(orders)


def pair_up(loads: Mapping[InstanceKey, float], config: MigrateConfig) -> list[tuple[InstanceKey, InstanceKey]]:
    """The fullest with the freest, each in one pair at most. Loads are shares of KV, what the queue will need included.

    Llumnix section 4.4.3.
    """
    by_load = sorted(loads, key=lambda key: (loads[key], key))
    free = [key for key in by_load if loads[key] < config.free_below]
    full = [key for key in reversed(by_load) if loads[key] > config.full_above]
    return list(zip(full, free, strict=False))


def _tokens(stats: InstanceStats) -> tuple[int, int]:
    """Tokens of KV that an instance, or the group that it leads, holds, and those that it has room for in all."""
    return stats.kv_blocks_used * stats.block_size, stats.kv_blocks_total * stats.block_size


def _load(instance: InstanceSnapshot) -> float:
    stats = instance.stats
    return (stats.kv_blocks_used + blocks_for(stats.queued_tokens, stats.block_size)) / stats.kv_blocks_total
