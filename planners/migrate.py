"""Where the requests of an instance go that is being emptied. Pure."""

from collections.abc import Sequence

from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.snapshot import InstanceSnapshot


def plan_evacuation(
    source: InstanceSnapshot, targets: Sequence[InstanceSnapshot], *, name: str, must_leave: bool
) -> tuple[Migrate, ...]:
    """One order for each target that has room, the freest first; ids begin with `name`.

    Each target gets a share of the source's KV by its free blocks, and never more than it has free. Where requests
    `must_leave`, there is an order also where no target has room: what cannot move is sent again from its tokens.
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
            max_tokens=free[key] if wanted >= total else min(free[key], -(-wanted * free[key] // total)),
            empties=True,
            must_leave=must_leave and index == last,
        )
        for index, key in enumerate(chosen)
    )


def _free_tokens(target: InstanceSnapshot) -> int:
    """Tokens of KV that it has room for, beyond what its own queue will need."""
    stats = target.stats
    return max(0, (stats.kv_blocks_total - stats.kv_blocks_used) * stats.block_size - stats.queued_tokens)
