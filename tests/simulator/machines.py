"""A small machine for tests: round figures, no catalog."""

import random
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.engine.cluster import ClusterShape
from pengserve.simulator.engine.memory import Sizes
from pengserve.simulator.engine.network import LinkNetwork
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.hardware.catalog import Gpu
from pengserve.simulator.machine import Machine
from pengserve.simulator.policies.policy import Facts
from pengserve.simulator.policies.registry import policy_named
from pengserve.simulator.requests import Arrival
from pengserve.simulator.result import Result
from pengserve.simulator.run import Simulation
from pengserve.simulator.timing.links import Latencies
from pengserve.simulator.timing.steps import Batch, prefill_tokens
from pengserve.simulator.timing.switches import SwitchCosts

GPU = Gpu(
    name="small",
    memory_bytes=24 << 30,
    hbm_bytes_per_s=1e12,
    flops=1e14,
    pcie_bytes_per_s=25e9,
    nic_bytes_per_s=25e9,
    nvlink_bytes_per_s=50e9,
    source="made up",
)
COSTS = SwitchCosts(call_s=2e-5, chunk_bytes=64 << 20, cutover_s=0.015, start_fixed_s=10.0, start_bytes_per_s=3e9)
TOKEN_BYTES = 1 << 17


class LinearTimes:
    """5 ms for the weights, and a little for each decode, token of context and of a prompt; a share of it in tp."""

    def __init__(self, degree: int) -> None:
        self._degree = degree

    def stage(self, num_stages: int) -> "LinearTimes":
        """See `ModelTimes`."""
        return LinearTimes(self._degree * num_stages)

    def step_s(self, batch: Batch) -> float:
        """See `StepTimes`."""
        work_s = 5e-3 + 5e-5 * batch.num_decodes + 2e-8 * batch.context_tokens + 5e-5 * prefill_tokens(batch.prefills)
        return 1e-3 + work_s / self._degree

    def decodes_s(self, batch: Batch, num_steps: int) -> float:
        """See `StepTimes`."""
        growth = batch.num_decodes * num_steps * (num_steps - 1) / 2
        return num_steps * self.step_s(batch) + 2e-8 * growth / self._degree

    def steps_within(self, batch: Batch, seconds: float) -> int:
        """See `StepTimes`."""
        return bisect_right(range(1, 1 << 20), seconds, key=lambda count: self.decodes_s(batch, count))


def config_of(policy: str = "pengserve", options: dict[str, Any] | None = None, **given: Any) -> SimulationConfig:
    """A configuration of the small machine; `given` are its sections, `cluster` among them."""
    cluster = {"gpu": "small", "model": "small", "instances": 2, **given.pop("cluster", {})}
    data = {"cluster": cluster, "policy": {"name": policy, "options": options or {}}, "scheduler": "fast", **given}
    return SimulationConfig.parse(data)


def simulation_of(config: SimulationConfig, arrivals: Sequence[Arrival], *, kv_tokens: int = 20_000) -> Simulation:
    """A simulation on the small machine, whose instances hold `kv_tokens` tokens of KV alone, and weights of 8 GiB."""
    cluster = config.cluster
    facts = Facts(
        num_instances=cluster.instances,
        per_node=cluster.per_node,
        degrees=cluster.degrees,
        max_stages=cluster.max_stages,
    )
    setup = policy_named(config.policy.name).model_validate(config.policy.options).setup(facts)
    sizes = Sizes(
        memory_bytes=(8 << 30) + kv_tokens * TOKEN_BYTES,
        weight_bytes=8 << 30,
        num_layers=32,
        layer_bytes=240 << 20,
        token_bytes=TOKEN_BYTES,
        num_kv_heads=8,
        max_num_seqs=cluster.max_num_seqs,
        block_size=cluster.block_size,
        max_model_len=cluster.max_model_len or 8192,
        is_static=setup.is_static,
    )
    shapes = [f"tp{degree}" for degree in setup.degrees]
    shapes += [f"pp{1 << power}" for power in range(1, setup.max_stages.bit_length())]
    machine = Machine(
        shape=ClusterShape(
            num_instances=cluster.instances,
            per_node=cluster.per_node,
            sizes=sizes,
            shapes=tuple(shapes),
            start_s=10.0 if cluster.start_s is None else cluster.start_s,
        ),
        times=LinearTimes,
        network=lambda: LinkNetwork(GPU, cluster.instances, cluster.per_node, Latencies(nvlink_s=1e-5, nic_s=1e-5)),
        scheduler="vllm" if config.scheduler == "vllm" else "fast",
        options=SchedulerOptions(
            max_num_batched_tokens=cluster.max_num_batched_tokens,
            policy=cluster.scheduling,
            preemption=setup.preemption,
            short_prompts=setup.short_prompts,
            short_first_steps=setup.short_first_steps,
        ),
        activation_bytes=8192,
        host_bytes_per_s=25e9,
        costs=COSTS,
    )
    return Simulation(config, setup, machine, arrivals, lambda progress: None)


def simulate_small(config: SimulationConfig, arrivals: Sequence[Arrival], *, kv_tokens: int = 20_000) -> Result:
    """Runs it to its end."""
    return simulation_of(config, arrivals, kv_tokens=kv_tokens).run_to_end()


def poisson(count: int, rate_per_s: float, *, seed: int = 1, start_s: float = 0.0, **given: Any) -> list[Arrival]:
    """Requests of 50 to 1,000 prompt tokens and 10 to 300 of output."""
    random_ = random.Random(seed)
    at_s, found = start_s, []
    for index in range(count):
        at_s += random_.expovariate(rate_per_s)
        prompt, output = random_.randint(50, 1000), random_.randint(10, 300)
        name = f"{given.get('name', 'r')}{index}"
        degree, priority = given.get("degree"), given.get("priority", 0)
        found.append(
            Arrival(
                request_id=name, at_s=at_s, prompt_tokens=prompt, output_tokens=output, degree=degree, priority=priority
            )
        )
    return found
