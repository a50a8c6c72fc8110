"""Data parallelism where running requests migrate from full instances to free ones, live (Llumnix-like).

A request's KV is copied while it runs; what it has generated meanwhile is copied again, until little is left. Then it
stops for that little, and goes on at the other instance (Llumnix section 4.2).
"""

import asyncio
from functools import partial

from pydantic import Field, model_validator

from pengserve.planners.migrate import pair_up
from pengserve.planners.types.config import MigrateConfig
from pengserve.planners.types.snapshot import InstanceState
from pengserve.planners.types.units import blocks_for
from pengserve.simulator.engine.cluster import SimCluster
from pengserve.simulator.engine.instance import SimInstance
from pengserve.simulator.policies.policy import Facts, Policy, Setup
from pengserve.simulator.requests import LiveRequest

_MAX_COPIES = 4  # of one request, the last one while it stops


class Migration(Policy):
    """Every `interval_s` the fullest instances are paired with the freest ones, and one request of each pair moves."""

    interval_s: float = Field(default=1.0, gt=0)
    full_above: float = Field(default=0.85, gt=0)  # virtual KV load from which requests leave an instance
    free_below: float = Field(default=0.6, gt=0)  # ... and below which an instance takes them

    @model_validator(mode="after")
    def _can_plan(self) -> "Migration":
        self.config()
        return self

    def config(self) -> MigrateConfig:
        """What the planner of migrations goes by."""
        return MigrateConfig(full_above=self.full_above, free_below=self.free_below)

    def setup(self, facts: Facts) -> Setup:
        """Every instance alone, and the task that migrates requests between them."""
        return Setup(companion=partial(_balance, self))


async def _balance(options: Migration, cluster: SimCluster) -> None:
    """Pairs instances again and again; migrations run beside each other, one an instance."""
    config = options.config()
    busy: dict[asyncio.Task[None], tuple[SimInstance, SimInstance]] = {}
    while True:
        await asyncio.sleep(options.interval_s)
        busy = {task: pair for task, pair in busy.items() if not task.done()}
        taken = {instance for pair in busy.values() for instance in pair}
        ready = [i for i in cluster.living() if i.state is InstanceState.READY and i not in taken]
        of = {instance.key: instance for instance in ready}
        for full, free in pair_up({key: _load(instance) for key, instance in of.items()}, config):
            source, target = of[full], of[free]
            request = _choose(source, target)
            if request is not None:
                task = asyncio.get_running_loop().create_task(_migrate(cluster, request, source, target))
                busy[task] = source, target


def _load(instance: SimInstance) -> float:
    """Virtual KV load: what is resident, and what the queue will need."""
    scheduler = instance.lane.scheduler
    used = scheduler.num_blocks - scheduler.num_free
    return (used + blocks_for(scheduler.queued_tokens, instance.capacity.block_size)) / max(1, scheduler.num_blocks)


def _choose(source: SimInstance, target: SimInstance) -> LiveRequest | None:
    """The shortest request that fits: it is copied soonest. None where there is none."""
    scheduler = source.lane.scheduler
    room = target.lane.scheduler.num_free * target.capacity.block_size // 2
    able = [r for r in scheduler.running if r.num_generated and scheduler.computed_tokens(r) < room]
    return min(able, key=lambda r: (scheduler.computed_tokens(r), r.request_id), default=None)


async def _migrate(cluster: SimCluster, request: LiveRequest, source: SimInstance, target: SimInstance) -> None:
    """Copies one request's KV, and moves it; it stays where it is when it ends, or one of the two dies, meanwhile."""
    copied, few = 0, source.capacity.block_size
    for _ in range(_MAX_COPIES):
        left = _computed(request, source) - copied
        if left <= few:
            break
        await _send(cluster, source, target, left)
        copied += left
        if not _is_there(request, source) or not target.is_alive:
            return
    await source.lane.pause()
    try:
        left = _computed(request, source) - copied
        if left < 0 or not _is_there(request, source) or not target.is_alive:
            return
        computed = left + copied
        source.lane.remove([request])
    finally:
        if source.is_alive:
            source.lane.resume()
    started_s = asyncio.get_running_loop().time()
    # No lane holds the request while its last blocks are sent. Where the target cannot take it, `moved` sends it again.
    await _send(cluster, source, target, left)
    request.stalls_s += asyncio.get_running_loop().time() - started_s
    if target.is_alive and target.lane.admit(request, computed):
        cluster.owner.moved([request], target.key, carried=True)
        target.lane.resume()
    else:
        cluster.owner.moved([request], None, carried=False)
    cluster.owner.touched(source.key)
    cluster.owner.touched(target.key)


async def _send(cluster: SimCluster, source: SimInstance, target: SimInstance, num_tokens: int) -> None:
    await cluster.network.send(source, target, num_tokens * source.sizes.dp_token_bytes, is_weights=False)


def _is_there(request: LiveRequest, instance: SimInstance) -> bool:
    return instance.is_alive and request.at == instance.key and request in instance.lane.scheduler.running


def _computed(request: LiveRequest, instance: SimInstance) -> int:
    return instance.lane.scheduler.computed_tokens(request) if _is_there(request, instance) else 0
