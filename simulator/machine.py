"""What a configuration's machines are, in figures: memory, step times, links; and lanes made of them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pengserve.planners.cost_model import CostModel
from pengserve.planners.stages import microbatches_in_flight
from pengserve.planners.types.layout import GroupKind, degree_of, tensor_degree_of
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.simulator.engine.cluster import ClusterShape, SimCluster
from pengserve.simulator.engine.driver import Driver, Owner
from pengserve.simulator.engine.fast_scheduler import FastScheduler
from pengserve.simulator.engine.gaps import GapCounter
from pengserve.simulator.engine.instance import SimInstance
from pengserve.simulator.engine.lane import SimLane
from pengserve.simulator.engine.network import LinkNetwork
from pengserve.simulator.engine.offload.planner import OffloadPlanner
from pengserve.simulator.engine.offload.scheduler import OffloadScheduler
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.pipeline_lane import PipelineLane
from pengserve.simulator.engine.scheduler import LaneScheduler
from pengserve.simulator.engine.swapping.costs import SwapCosts, SwapOptions
from pengserve.simulator.engine.swapping.scheduler import SwapScheduler
from pengserve.simulator.requests import LiveRequest
from pengserve.simulator.timing.steps import Batch, ModelTimes, prefill_tokens
from pengserve.simulator.timing.switches import SwitchCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything about a cluster that is not a decision."""

    shape: ClusterShape
    times: Callable[[int], ModelTimes]  # of the whole model, by the instances that compute a layer together
    network: Callable[[], LinkNetwork]  # made in the running loop
    scheduler: Literal["vllm", "fast"]
    options: SchedulerOptions
    activation_bytes: int  # that a stage sends on for a token
    host_bytes_per_s: float  # of one instance, to its host's memory
    costs: SwitchCosts
    processors: float = 1.0  # of an instance; below 1 instances share them, and steps were timed while all were busy
    lookahead: CostModel | None = None  # of the whole model, for the microbatches of pipelines
    host: str = "unused"  # what `host_bytes` of each instance are for: a `policies.policy.HostUse`
    host_bytes: int = 0
    offload: Callable[[], OffloadPlanner] | None = None
    swap: SwapOptions | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def finds_prefixes(self) -> bool:
        """Whether schedulers cache prefixes: vLLM's alone does."""
        return self.options.prefix_caching and self.scheduler == "vllm"

    def cluster(self, owner: Owner, gaps: GapCounter) -> SimCluster:
        """A cluster without instances, in the running loop."""
        network = self.network()

        def build(shape: str, capacity: KvCapacity, members: tuple[SimInstance, ...]) -> Driver:
            return self._lane(shape, capacity, members, owner, gaps, network)

        return SimCluster(self.shape, build=build, owner=owner, network=network, costs=self.costs)

    def _lane(
        self,
        shape: str,
        capacity: KvCapacity,
        members: tuple[SimInstance, ...],
        owner: Owner,
        gaps: GapCounter,
        network: LinkNetwork,
    ) -> Driver:
        leader, times = members[0], self.times(tensor_degree_of(shape))

        def on_end(requests: Sequence[LiveRequest]) -> None:
            leader.note_ended(requests)
            owner.ended(requests)

        def on_step() -> None:
            owner.stepped(leader.key)

        # As in production, groups begin long prompts with whole steps.
        is_short = self.options.short_first_steps and degree_of(shape) == 1
        options = replace(self.options, short_first_steps=is_short)
        if not shape.startswith(GroupKind.PP):
            scheduler = self._scheduler(capacity, options, times)

            def swap_s(out_bytes: int, in_bytes: int) -> float:
                # Copies go both ways at once, beside the step before (as InferCept overlaps them).
                return max(0.0, max(out_bytes, in_bytes) / self.host_bytes_per_s - lane.last_step_s)

            lane = SimLane(scheduler, times, on_end=on_end, on_step=on_step, gaps=gaps, swap_s=swap_s)
            return lane
        first_s = network.hop_s(members, 0)
        each_s = (network.hop_s(members, 1 << 30) - first_s) * self.activation_bytes / (1 << 30)

        def transfer_s(batch: Batch) -> float:
            return first_s + each_s * (batch.num_decodes + prefill_tokens(batch.prefills))

        num_stages = degree_of(shape)
        max_in_flight = microbatches_in_flight(num_stages, self.processors)
        options = replace(
            options,
            num_stages=num_stages,
            max_in_flight=max_in_flight,
            lookahead=self.lookahead,
            preemption="recompute",
        )
        scheduler = self._scheduler(capacity, options)
        return PipelineLane(
            scheduler,
            times,
            on_end=on_end,
            transfer_s=transfer_s,
            stage_times=times.stage(num_stages),
            # Members that wait for each other leave each other their processors.
            pace=max(self.processors, max_in_flight / num_stages),
            on_step=on_step,
            gaps=gaps,
        )

    def _scheduler(
        self, capacity: KvCapacity, options: SchedulerOptions, times: ModelTimes | None = None
    ) -> LaneScheduler:
        tiers = self.shape.sizes.tiers
        if self.offload is not None and times is not None and tiers is not None:
            clock = asyncio.get_running_loop().time
            return OffloadScheduler(capacity, options, tiers, times, self.offload(), clock)
        if self.swap is not None and times is not None:
            return self._with_swap(capacity, options, self.swap)
        if self.scheduler == "fast":
            return FastScheduler(capacity, options, asyncio.get_running_loop().time)
        if self.host != "unused" and times is not None:
            return self._with_host(capacity, options, times)
        from pengserve.simulator.engine.vllm_scheduler import VllmScheduler  # importing vLLM takes seconds

        return VllmScheduler(capacity, options, clock=asyncio.get_running_loop().time)

    def _with_swap(self, capacity: KvCapacity, options: SchedulerOptions, swap: SwapOptions) -> LaneScheduler:
        costs = SwapCosts(
            num_layers=self.shape.sizes.num_layers,
            block_bytes=capacity.bytes_per_block,
            bytes_per_s=self.host_bytes_per_s,
        )
        num_host = self.host_bytes // capacity.bytes_per_block
        return SwapScheduler(capacity, options, costs, swap, num_host, asyncio.get_running_loop().time)

    def _with_host(self, capacity: KvCapacity, options: SchedulerOptions, times: ModelTimes) -> LaneScheduler:
        from pengserve.simulator.engine.tiers.prefixes import PrefixOffloadScheduler  # as above
        from pengserve.simulator.engine.tiers.scheduler import TieredScheduler

        clock = asyncio.get_running_loop().time
        if self.host == "prefixes":
            num_blocks = self.host_bytes // capacity.bytes_per_block
            return PrefixOffloadScheduler(capacity, options, num_blocks, self.host_bytes_per_s, clock)
        tiers = self.shape.sizes.tiers
        assert tiers is not None, "a policy with tiers has memory of the host"
        return TieredScheduler(capacity, options, tiers, times, clock)
