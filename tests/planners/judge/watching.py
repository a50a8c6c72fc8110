"""Looks at a cluster that serves: totals grow as its requests come, and steps take what a cost says."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pengserve.planners.types.ages import AGES
from pengserve.planners.types.ids import Epoch
from pengserve.planners.types.layout import Group, Layout, degree_of
from pengserve.planners.types.snapshot import (
    ClusterSnapshot,
    InstanceSnapshot,
    InstanceStats,
    LaneInfo,
    LayoutPolicy,
)
from pengserve.planners.types.step_cost import StepCost
from tests.planners.clusters import T0_S, capacity, pipeline_capacity, snapshot, stats

# About a 14B model on one A800, in blocks of 32 tokens; two together are 1.33 times as fast.
COST = StepCost(load_s=0.02, token_s=5e-5, extra_s=6e-5, seq_s=5e-5, context_s=1.3e-7, pair_s=2.7e-9)
COSTS: Mapping[str, StepCost] = {
    "dp": COST,
    **{f"tp{p}": StepCost(**{n: getattr(COST, n) * 1.5 / p for n in COST.__slots__}) for p in (2, 4)},
    **{f"pp{s}": StepCost(**{n: getattr(COST, n) * 1.08 for n in COST.__slots__}) for s in (2, 4, 8)},
}
BLOCKS = 4096  # of an instance, of 32 tokens
WEIGHTS = 4096  # blocks where its parameters are


def lanes(costs: Mapping[str, StepCost] = COSTS, blocks: int = BLOCKS) -> tuple[LaneInfo, ...]:
    """dp, tp2, tp4 and pp2, pp4 of an instance."""
    found = []
    for shape in ("dp", "tp2", "tp4", "pp2", "pp4"):
        degree = degree_of(shape)
        lane = capacity(degree if shape.startswith("tp") else 1, slots=256)
        num_blocks = blocks
        if shape.startswith("pp"):
            lane = replace(pipeline_capacity(degree), max_num_seqs=256)
            num_blocks = degree * blocks + (degree - 1) * WEIGHTS
        lane = replace(lane, num_blocks=num_blocks, max_model_len=num_blocks * lane.block_size)
        found.append(LaneInfo(shape=shape, capacity=lane, step_cost=costs.get(shape)))
    return tuple(found)


def served(
    num_instances: int = 4,
    layout: str = "",
    *,
    rate: float = 1.0,
    prompt: int = 1000,
    output: int = 200,
    running: int = 4,
    waiting: int = 0,
    seconds: float = 30.0,
    costs: Mapping[str, StepCost] = COSTS,
    slow: float = 1.0,
    blocks: int = BLOCKS,
) -> Iterator[ClusterSnapshot]:
    """Looks twice a second. `rate`, `running`, `waiting` are of each instance; steps take `slow` times their cost."""
    for tick in range(int(seconds * 2)):
        t_s = tick / 2
        loads = {}
        for group in snapshot(num_instances, layout, degrees=(2, 4), max_stages=4).layout.groups:
            loads[int(group.leader)] = _stats(
                group, t_s, rate, prompt, output, running, waiting, slow, blocks, costs or COSTS
            )
            for member in group.members[1:]:
                loads[int(member)] = stats(group.shape, is_follower=True)
        seen = snapshot(num_instances, layout, loads, time_s=T0_S + t_s, degrees=(2, 4), max_stages=4)
        own = lanes(costs, blocks)
        yield replace(seen, instances=tuple(replace(i, lanes=own, capacity=own[0].capacity) for i in seen.instances))


def laid_out(seen: ClusterSnapshot, groups: tuple[Group, ...], epoch: int) -> ClusterSnapshot:
    """`seen` in another layout."""
    return replace(seen, layout=Layout(epoch=Epoch(epoch), groups=groups))


def _stats(
    group: Group,
    t_s: float,
    rate: float,
    prompt: int,
    output: int,
    running: int,
    waiting: int,
    slow: float,
    blocks: int,
    costs: Mapping[str, StepCost],
) -> InstanceStats:
    wide, num_steps = group.degree, int(20 * t_s)
    phase = 0.37 * group.leader % 1.0  # requests do not come to all groups at the same instant
    requests, running, waiting = int(rate * wide * t_s + phase * bool(rate)), running * wide, waiting * wide
    lane = next(lane.capacity for lane in lanes(blocks=blocks) if lane.shape == group.shape)
    assert lane is not None
    held = running * (prompt + output // 2)
    tokens, context = num_steps * running + requests * prompt, num_steps * held
    step_s = slow * costs[group.shape].step_s(running, running, held)
    return InstanceStats(
        shape=group.shape,
        num_running=running,
        num_waiting=waiting,
        kv_blocks_used=min(lane.num_blocks, -(-held // lane.block_size)),
        kv_blocks_total=lane.num_blocks,
        block_size=lane.block_size,
        queued_tokens=waiting * prompt,
        max_model_len=lane.max_model_len,
        longest_tokens=prompt + output if running else 0,
        **{name: output * (2 * at + 1) // (2 * len(AGES)) for at, name in enumerate(AGES) if running},
        total_requests=requests,
        total_request_tokens=requests * prompt,
        total_finished=requests,
        total_finished_tokens=requests * output,
        total_generated_tokens=requests * output,
        total_costed_steps=num_steps,
        total_step_us=int(num_steps * step_s * 1e6 + requests * prompt * slow * costs[group.shape].token_s * 1e6),
        total_step_tokens=tokens,
        total_step_seqs=num_steps * running,
        total_step_context=context,
    )


def of(seen: ClusterSnapshot, instance_id: int) -> InstanceSnapshot:
    """One instance."""
    return seen.instances[instance_id]


def calm_then_burst(
    count: int, *, calm_s: float = 20.0, prompt: int = 93, output: int = 190
) -> Iterator[ClusterSnapshot]:
    """Two instances with little memory. A user has pinned dp while a request came every other second; it is released
    as `count` requests come at once to each. Nothing comes after these, and none of them has ended yet.
    """
    own = lanes({}, blocks=105)
    for tick in range(int(calm_s * 2) + 8):
        t_s = tick / 2
        burst_s = max(0.0, t_s - calm_s)
        requests, num_steps, tokens = int(min(t_s, calm_s) / 2), int(40 * min(t_s, calm_s)), int(40 * burst_s)
        running = count if burst_s else 1
        held = running * (prompt + (tokens if burst_s else output // 2))
        step_s = COST.step_s(count, count, held)
        found = InstanceStats(
            num_running=running,
            kv_blocks_used=min(105, -(-held // 32)),
            kv_blocks_total=105,
            block_size=32,
            max_model_len=105 * 32,
            longest_tokens=prompt + tokens,
            **dict.fromkeys(AGES, tokens if burst_s else output // 2),
            total_requests=requests + (count if burst_s else 0),
            total_request_tokens=(requests + (count if burst_s else 0)) * prompt,
            total_finished=requests,
            total_finished_tokens=requests * output,
            total_generated_tokens=requests * output + (count * tokens if burst_s else 0),
            total_costed_steps=num_steps + tokens,
            total_step_us=int(1e6 * (num_steps * COST.step_s(1, 1, prompt + output) + tokens * step_s)),
            total_step_tokens=num_steps + count * tokens + requests * prompt,
            total_step_seqs=num_steps + count * tokens,
            total_step_context=num_steps * (prompt + output // 2) + tokens * held,
        )
        seen = snapshot(2, "", {0: found, 1: found}, time_s=T0_S + t_s, max_stages=4)
        policy = LayoutPolicy(is_auto=burst_s > 0)
        yield replace(
            seen,
            policy=policy,
            instances=tuple(replace(i, lanes=own, capacity=own[0].capacity) for i in seen.instances),
        )
