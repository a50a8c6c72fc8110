"""From a configuration to the machine that it names, the requests that come, and what its policy wants."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import ValidationError

from pengserve.planners.cost_model import CostModel
from pengserve.planners.types.errors import ConfigError, UnsupportedShapeError
from pengserve.planners.types.step_cost import StepCost
from pengserve.simulator.config import ClusterConfig, SimulationConfig, explain
from pengserve.simulator.engine.cluster import ClusterShape
from pengserve.simulator.engine.memory import MIN_BLOCKS, Sizes, require_room
from pengserve.simulator.engine.network import LinkNetwork
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.hardware.catalog import Gpu, ModelSpec, Profile, load_catalog
from pengserve.simulator.machine import Machine
from pengserve.simulator.policies.policy import Facts, Setup
from pengserve.simulator.policies.registry import policy_named
from pengserve.simulator.requests import Arrival
from pengserve.simulator.timing.choose import Timing, profile_times, step_times
from pengserve.simulator.timing.cost_model_times import fit_cost_model
from pengserve.simulator.timing.step_costs import step_costs
from pengserve.simulator.timing.steps import ModelTimes
from pengserve.simulator.timing.switches import SwitchCosts, latencies, switch_costs
from pengserve.simulator.traces.config import build

MOST_FOR_VLLM = 64  # instances that vLLM's own schedulers serve in reasonable time


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """The catalog's rows that a configuration names."""

    gpu: Gpu
    model: ModelSpec
    profile: Profile | None = None

    @property
    def what(self) -> str:
        """For people."""
        return f"{self.model.name} on {self.gpu.name}"


def setup_of(config: SimulationConfig) -> Setup:
    """What the policy wants of the cluster.

    Raises:
        ConfigError: there is no such policy or option, or this cluster cannot be so; names the field.
    """
    cluster = config.cluster
    kind = policy_named(config.policy.name)
    try:
        policy = kind.model_validate(config.policy.options)
    except ValidationError as error:
        raise ConfigError(f"policy.options.{explain(error, kind)}") from None
    for name, wanted, room in (
        ("degrees", max(cluster.degrees, default=1), min(cluster.instances, cluster.per_node)),
        ("max_stages", cluster.max_stages, cluster.instances),
    ):
        if wanted > room:
            raise ConfigError(f"cluster.{name} asks for groups of {wanted} instances, and there are at most {room}")
    facts = Facts(
        num_instances=cluster.instances,
        per_node=cluster.per_node,
        degrees=cluster.degrees,
        max_stages=cluster.max_stages,
        has_host=cluster.host_bytes > 0,
    )
    return policy.setup(facts)


def arrivals_of(config: SimulationConfig) -> tuple[Arrival, ...]:
    """The requests of the configuration's trace.

    Raises:
        ConfigError: there is no trace, or it cannot be read; names file, row or field.
    """
    if config.trace is None:
        raise ConfigError("trace is missing: name a file or a generator")
    arrivals = build(config.trace, config.seed, config.folder)
    slo = config.slo
    return tuple(replace(arrival, ttft_s=slo.ttft_s, tbt_s=slo.tbt_s) for arrival in arrivals)


def machine_of(config: SimulationConfig, setup: Setup) -> Machine:
    """The machine, in figures.

    Raises:
        ConfigError: an unknown GPU or model, or one that does not fit; names the field.
    """
    cluster, named = config.cluster, _named(config)
    links = _links(cluster, named.gpu)
    sizes = _sizes(cluster, named, setup, links.pcie_bytes_per_s)
    shapes = _shapes(setup)
    _check_places(cluster, sizes, shapes, setup, named.what)
    times, assumptions = _times(cluster, named, setup)
    costs = _costs(config, named.gpu)
    scheduler = _scheduler(config, setup)
    return Machine(
        shape=ClusterShape(
            num_instances=cluster.instances,
            per_node=cluster.per_node,
            sizes=sizes,
            shapes=shapes,
            start_s=costs.start_s(named.model) if cluster.start_s is None else cluster.start_s,
            step_costs=_step_costs(cluster, sizes, shapes, times, setup),
            step_tokens=cluster.max_num_batched_tokens,
        ),
        times=times,
        network=lambda: LinkNetwork(links, cluster.instances, cluster.per_node, latencies()),
        scheduler=scheduler,
        options=SchedulerOptions(
            max_num_batched_tokens=cluster.max_num_batched_tokens,
            policy=cluster.scheduling,
            prefix_caching=cluster.prefix_caching,
            preemption=setup.preemption,
            short_prompts=setup.short_prompts,
            late_prompts=setup.late_prompts,
            long_answers=setup.long_answers,
            short_first_steps=setup.short_first_steps,
        ),
        activation_bytes=named.model.activation_bytes_per_token,
        host_bytes_per_s=links.pcie_bytes_per_s,
        host_bytes=cluster.host_bytes,
        host=setup.host,
        offload=setup.offload,
        swap=setup.swap,
        # A static pipeline is vLLM's own, which counts tokens alone.
        lookahead=_lookahead(cluster, sizes, times(1)) if setup.max_stages > 1 and not setup.is_static else None,
        costs=costs,
        processors=cluster.processors,
        assumptions=(*assumptions, *_more_assumptions(cluster, named.model, setup, scheduler)),
    )


def _named(config: SimulationConfig) -> _Named:
    cluster = config.cluster
    catalog = load_catalog(*(config.folder / path for path in cluster.catalog))
    if cluster.profile is not None:
        profile = catalog.profile(cluster.profile)
        return _Named(gpu=catalog.gpu(cluster.gpu or profile.gpu), model=profile.model, profile=profile)
    assert cluster.gpu is not None and cluster.model is not None, "checked by ClusterConfig"
    return _Named(gpu=catalog.gpu(cluster.gpu), model=catalog.model(cluster.model))


def _sizes(cluster: ClusterConfig, named: _Named, setup: Setup, link_bytes_per_s: float) -> Sizes:
    gpu, model, width = named.gpu, named.model, cluster.gpus_per_instance
    per_gpu = int(gpu.memory_bytes * cluster.memory_utilization) - cluster.reserved_bytes
    sizes = Sizes(
        memory_bytes=per_gpu * width,
        weight_bytes=model.weight_bytes,
        num_layers=model.layers,
        layer_bytes=model.layer_bytes,
        token_bytes=model.kv_bytes_per_token,
        num_kv_heads=model.kv_heads,
        base_degree=width,
        block_size=cluster.block_size,
        max_model_len=cluster.max_model_len or model.max_model_len,
        max_num_seqs=cluster.max_num_seqs,
        is_static=setup.is_static,
        host_bytes=cluster.host_bytes if setup.host in ("tiers", "offload") else 0,
        link_bytes_per_s=link_bytes_per_s,
    )
    kv_tokens = cluster.kv_tokens
    if kv_tokens is None and named.profile is not None:
        kv_tokens = named.profile.kv_tokens
    if kv_tokens is None:
        return sizes
    return replace(sizes, memory_bytes=model.weight_bytes + kv_tokens * sizes.dp_token_bytes)


def _links(cluster: ClusterConfig, gpu: Gpu) -> Gpu:
    """The GPU with all links of one instance, which has those of its GPUs together."""
    width, given = cluster.gpus_per_instance, cluster.links
    return replace(
        gpu,
        nvlink_bytes_per_s=given.get("nvlink", gpu.nvlink_bytes_per_s) * width,
        nic_bytes_per_s=given.get("nic", gpu.nic_bytes_per_s) * width,
        pcie_bytes_per_s=given.get("pcie", gpu.pcie_bytes_per_s) * width,
    )


def _costs(config: SimulationConfig, gpu: Gpu) -> SwitchCosts:
    """Those of the device, or as the configuration has them."""
    return replace(switch_costs(gpu), **config.switches.model_dump(exclude_none=True))


def _shapes(setup: Setup) -> tuple[str, ...]:
    """Shapes beside dp."""
    pipelines = [f"pp{1 << power}" for power in range(1, setup.max_stages.bit_length())]
    return (*(f"tp{degree}" for degree in setup.degrees), *pipelines)


def _check_places(cluster: ClusterConfig, sizes: Sizes, shapes: tuple[str, ...], setup: Setup, what: str) -> None:
    """Raise ConfigError where a shape that will serve has no room for the model."""
    pinned = {group.shape for group in setup.layout}
    try:
        for shape in sorted(pinned) or ["dp", *shapes]:
            require_room(sizes, shape, what)
        longest = max(sizes.lane(shape).max_model_len for shape in pinned or {"dp", *shapes})
    except UnsupportedShapeError as error:
        raise ConfigError(f"{what} cannot be cut into so many stages: {error}; lower cluster.max_stages") from None
    if cluster.max_model_len is not None and cluster.max_model_len > longest:
        raise ConfigError(
            f"cluster.max_model_len is {cluster.max_model_len}, and the memory of {what} holds {longest} tokens of one"
            " request at most: lower it, or allow wider groups"
        )


def _times(cluster: ClusterConfig, named: _Named, setup: Setup) -> tuple[Callable[[int], ModelTimes], tuple[str, ...]]:
    """Step times by the instances that compute a layer together, and what had to be assumed for them."""
    found: dict[int, Timing] = {}
    for degree in (1, *setup.degrees):
        width = degree * cluster.gpus_per_instance
        if named.profile is None:
            found[degree] = step_times(named.gpu, named.model, width, async_scheduling=cluster.async_scheduling)
        elif width == 1:
            found[degree] = profile_times(named.profile)
        else:
            raise ConfigError(
                f"the profile {named.profile.name} is of one device, and {width} would compute a layer together:"
                " leave out cluster.degrees, or name a gpu and a model"
            )
    assumptions = dict.fromkeys(sentence for timing in found.values() for sentence in timing.assumptions)
    return lambda degree: found[degree].times, tuple(assumptions)


def _more_assumptions(cluster: ClusterConfig, model: ModelSpec, setup: Setup, scheduler: str) -> Iterator[str]:
    """What else had to be assumed, one sentence each."""
    if cluster.prefix_caching and scheduler == "fast":
        yield "No prefix is cached: the fast scheduler knows none."
    if setup.max_stages > 1 and not model.embedding_params:
        yield f"All weights of {model.name} count as those of layers: its embeddings are not known."


def _lookahead(cluster: ClusterConfig, sizes: Sizes, times: ModelTimes) -> CostModel:
    """What the production planner of microbatches is told that steps cost."""
    model, _ = fit_cost_model(
        times,
        max_batched_tokens=cluster.max_num_batched_tokens,
        max_num_seqs=cluster.max_num_seqs,
        max_model_len=min(sizes.max_model_len, sizes.dp.num_tokens),
    )
    return model


def _step_costs(
    cluster: ClusterConfig, sizes: Sizes, shapes: tuple[str, ...], times: Callable[[int], ModelTimes], setup: Setup
) -> Mapping[str, StepCost]:
    """What the production judge is told that steps cost by shape; a static layout is judged by no planner."""
    if not shapes or setup.is_static:
        return {}
    max_len = max(MIN_BLOCKS * cluster.block_size, min(sizes.max_model_len, sizes.dp.num_tokens))
    return step_costs(times, shapes, cluster.max_num_batched_tokens, cluster.max_num_seqs, max_len)


def _scheduler(config: SimulationConfig, setup: Setup) -> Literal["vllm", "fast"]:
    if config.scheduler == "vllm" and setup.preemption == "swap":
        raise ConfigError("scheduler is vllm, which has no swapping: take fast, or auto")
    if setup.host != "unused":
        if config.scheduler == "fast":
            raise ConfigError("scheduler is fast, which knows no host tier: take vllm, or auto")
        return "vllm"
    if config.scheduler != "auto":
        return config.scheduler
    return "vllm" if config.cluster.instances <= MOST_FOR_VLLM and setup.preemption == "recompute" else "fast"
