"""Laws of small batches whose layers are spread over device and host, under each policy of OrbitFlow's evaluation."""

import random
from dataclasses import replace

import pytest

from pengserve.planners.placement.solver import predicted_s
from pengserve.planners.placement.values import Decode, Machine
from pengserve.planners.types.errors import ConfigError
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.simulator.engine.memory import Tiers
from pengserve.simulator.engine.offload.planner import OffloadPlanner, Placed
from pengserve.simulator.engine.offload.scheduler import OffloadScheduler
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.policies.offload.base import OffloadPolicy
from pengserve.simulator.policies.offload.deepspeed import DeepSpeed
from pengserve.simulator.policies.offload.flexgen import FlexGen
from pengserve.simulator.policies.offload.heuristic import DynamicHeuristic
from pengserve.simulator.policies.offload.orbitflow import OrbitFlow
from pengserve.simulator.policies.offload.slo_aware import SloAware
from pengserve.simulator.policies.policy import Facts
from pengserve.simulator.requests import Arrival, LiveRequest
from pengserve.simulator.timing.steps import Batch

POLICIES = [
    DeepSpeed(), FlexGen(), FlexGen(is_plus=True), SloAware(), DynamicHeuristic(), OrbitFlow(),
    OrbitFlow(pauses=False), OrbitFlow(deposit=False), OrbitFlow(per_request=False),
]  # fmt: skip
TIERS = Tiers(num_layers=8, device_blocks=65, host_blocks=80, block_bytes=8192, bytes_per_s=8192 * 20_000.0)
CAPACITY = KvCapacity(
    num_blocks=140, block_size=16, bytes_per_block=65536, max_model_len=900, max_num_seqs=4, weight_bytes=0
)


class Times:
    def step_s(self, batch: Batch) -> float:
        return 0.02 + 1e-6 * batch.context_tokens + sum(1e-4 * chunk.num_tokens for chunk in batch.prefills)

    decodes_s = steps_within = step_s  # type: ignore[assignment]


class Watched:
    """Checks what a policy is told and says."""

    def __init__(self, planner: OffloadPlanner) -> None:
        self.planner = planner
        self.longest_pause_s = 0.0

    def place(self, requests: list[Decode], machine: Machine, last_step_s: float | None) -> Placed:
        placed = self.planner.place(requests, machine, last_step_s)
        assert set(placed.spreads) | placed.paused == {request.request_id for request in requests}
        self.longest_pause_s = max([self.longest_pause_s, *(r.paused_s or 0.0 for r in requests)])
        return placed


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_request_ends_and_every_step_fits(policy: OffloadPolicy) -> None:
    rng, now = random.Random(3), [0.0]
    watched = Watched(policy.planner())
    scheduler = OffloadScheduler(
        CAPACITY,
        SchedulerOptions(max_num_batched_tokens=1024),
        TIERS,
        Times(),
        watched,
        lambda: now[0],  # type: ignore[arg-type]
    )
    lives = [
        LiveRequest(
            Arrival(
                request_id=f"r{i}", at_s=0.0, prompt_tokens=rng.randint(20, 500), output_tokens=rng.randint(2, 300),
                tbt_s=0.04,
            )
        )
        for i in range(12)
    ]  # fmt: skip
    for live in lives:
        scheduler.add(live)
    while (step := scheduler.schedule()) is not None:
        if not step.batch.prefills:
            stepped = [scheduler._view(e, now[0]) for e in scheduler._running if e.live in step.requests]
            assert predicted_s(stepped, scheduler.machine) < float("inf"), "it does not fit"
        before_s, now[0] = now[0], now[0] + Times().step_s(step.batch) + step.stall_s
        for live in step.due:
            live.note_token(now[0], live.last_token_s)
            live.last_token_s = now[0]
        assert now[0] > before_s
        scheduler.finish(step)
    assert all(live.is_done for live in lives)
    assert scheduler.staged_cells > 0, "memory was never short"
    assert scheduler.num_free == CAPACITY.num_blocks
    assert watched.longest_pause_s < 12.0, "a paused request starves"


def test_orbitflow_misses_fewer_slos_than_one_distance_for_all() -> None:
    late = {policy: _late(policy) for policy in (DeepSpeed(), FlexGen(is_plus=True), OrbitFlow())}
    assert late[OrbitFlow()] < late[FlexGen(is_plus=True)] <= late[DeepSpeed()]


def _late(policy: OffloadPolicy) -> int:
    now = [0.0]
    scheduler = OffloadScheduler(
        CAPACITY,
        SchedulerOptions(max_num_batched_tokens=1024),
        TIERS,
        Times(),
        policy.planner(),
        lambda: now[0],  # type: ignore[arg-type]
    )
    lives = [
        LiveRequest(Arrival(request_id=f"r{i}", at_s=0.0, prompt_tokens=250, output_tokens=200, tbt_s=0.04))
        for i in range(8)
    ]
    for live in lives:
        scheduler.add(live)
    while (step := scheduler.schedule()) is not None:
        now[0] += Times().step_s(step.batch) + step.stall_s
        for live in step.due:
            live.note_token(now[0], live.last_token_s)
            live.last_token_s = now[0]
        scheduler.finish(step)
    return sum(live.num_late_paced if policy == OrbitFlow() else live.num_late for live in lives)


def test_a_deposit_is_what_came_early() -> None:
    live = LiveRequest(Arrival(request_id="r", at_s=0.0, prompt_tokens=1, output_tokens=9, tbt_s=1.0))
    live.note_token(10.0, None)
    live.note_token(10.1, 10.0)
    live.note_token(10.4, 10.1, 3)  # three more, 0.1 s after each other
    assert live.deposit_tokens(10.4) == 3
    assert (live.num_late, live.num_late_paced) == (0, 0)
    live.note_token(13.0, 10.4)  # late, and the client notices nothing
    assert (live.num_late, live.num_late_paced) == (1, 0)
    live.note_token(20.0, 13.0)  # the deposit is empty
    assert (live.num_late, live.num_late_paced) == (2, 1)
    assert live.deposit_tokens(20.0) == 0


def test_offloading_needs_a_host() -> None:
    facts = Facts(num_instances=1, per_node=8, degrees=(), max_stages=1)
    with pytest.raises(ConfigError, match="host_bytes"):
        OrbitFlow().setup(facts)
    assert OrbitFlow().setup(replace(facts, has_host=True)).offload is not None
