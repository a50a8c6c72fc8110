"""A pipeline lane: vLLM's model of one stage, over the layers that this member keeps (KunServe sections 3 and 4.3).

The leader has the LAST stage, so that tokens are where the scheduler is:

    rank 0, stage s-1   schedule k ........ schedule k+1 .... run its layers of k -> sample -> outputs
    another, stage 0       \\-> run layers of k -> run k+1 ...        /
    another, stage 1             \\-> run k ...   -----hidden------> /

`planners/stages.py` says which rank has which stage. Up to s microbatches are in flight. A request is in one of them at
a time, but for chunks of its prompt; stages run microbatches in the order in which the leader made them.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pengserve.planners.cost_model import CostModel
from pengserve.planners.stages import rank_of, stage_layers, stage_of
from pengserve.planners.types.config import MicrobatchPolicy
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.groups.group_run import HIDDEN, GroupRun
from pengserve.replicas.engine.groups.hidden import (
    DeviceHidden,
    HiddenCodec,
    HiddenInbox,
    HiddenWay,
    order_of,
    require_order,
)
from pengserve.replicas.engine.groups.pp_blocks import PpBlocks
from pengserve.replicas.engine.groups.stage_clock import StageClock
from pengserve.replicas.engine.groups.under_way import Microbatch, spared_blocks
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from pengserve.replicas.engine.lanes.kv_shares import KvShare, LaneKv
from pengserve.replicas.engine.lanes.lane import FREE
from pengserve.replicas.engine.lanes.lane_build import (
    LaneModel,
    active_lane,
    build_model,
    build_scheduler,
    group_config,
)
from pengserve.replicas.engine.lanes.lane_groups import ActiveGroup, LaneGroup
from pengserve.replicas.engine.lanes.shared_model import share_layers
from pengserve.replicas.engine.lanes.warm_up import is_compiled
from pengserve.replicas.engine.scheduling.microbatches import (
    ANY,
    FIRST_MODEL,
    Microbatches,
    chunks_of,
    prompt_tokens_of,
)
from pengserve.replicas.engine.tiers.lane_tiers import LaneTiers, ToldUses, blocks_begun, uses_of
from pengserve.replicas.engine.tiers.residency import ResidentRequests
from pengserve.replicas.engine.tiers.stage_tiers import StageTiers, pipeline_sizes
from pengserve.replicas.engine.tiers.tier_runner import TierRunner
from pengserve.replicas.engine.vllm_seam import (
    EngineCoreOutputs,
    GrammarOutput,
    IntermediateTensors,
    SchedulerOutput,
    VllmConfig,
    layer_partition,
    set_current_vllm_config,
)
from pengserve.replicas.kv.placement import Use
from pengserve.replicas.kv.tiered_view import TieredKvView
from pengserve.replicas.memory.kv_views import KvView
from pengserve.replicas.memory.layers import LayerMemory


class _Supply:
    """What a pipeline has for its scheduler to hand out."""

    def __init__(self, lane: PpBlocks) -> None:
        self._lane = lane

    def num_used(self) -> int:
        """Blocks that requests hold, but for those whose KV is on its way."""
        return self._lane.num_used() - self._lane.num_arriving_blocks()

    def num_available(self) -> int:
        """Free blocks."""
        return self._lane.num_free()


class PpLane(PpBlocks):
    """One stage of a pipeline. All of its blocks are there from the start; what backs them comes with the drop."""

    _keeps_inputs = False  # what is captured in graphs reads the very memory into which hidden states are copied

    def __init__(
        self,
        base: DpLane,
        active: ActiveGroup,
        name: str,
        rank: int,
        num_stages: int,
        memory: LayerMemory,
        cost_model: CostModel = FIRST_MODEL,
        policy: MicrobatchPolicy = MicrobatchPolicy.LOOKAHEAD,
        clock: StageClock | None = None,
        model: LaneModel | None = None,
    ) -> None:
        """Builds the lane beside `base`; allocates no weights and no KV. Takes tens of milliseconds, and for as long as
        it takes to compile the model, where vLLM does that.

        Args:
            cost_model: of steps of the whole model, to begin with.
            policy: how microbatches are formed.
            clock: takes the times of this member's stage.
            model: of a lane that this one replaces.

        Raises:
            UnsupportedShapeError: this model cannot be cut into so many stages.
        """
        self.stage, self._memory = stage_of(rank, num_stages), memory
        self._keeps_inputs = is_compiled(base.pristine_config)
        sizes = memory.sizes
        ranges = stage_layers(sizes.num_layers, num_stages)
        self.stages, self.layers = ranges, ranges[self.stage]
        num_layers, block_size = self.layers[1] - self.layers[0], base.capacity.block_size
        self.sizes = pipeline_sizes(
            sizes,
            ranges,
            max_blocks=-(-base.pristine_config.model_config.max_model_len // block_size),
            has_host=base.tiers is not None,
        )
        own_rows = base.tiers.host.num_rows if base.tiers is not None else 0
        num_blocks = self.sizes.num_usable(self.sizes.smallest, own_rows)
        if model is not None and (model.tiers is None) is not (base.tiers is None):
            model = None  # the host tier has ended since: a runner without it is another one
        group = LaneGroup("pp", name, self.stage, num_stages, is_compiled=is_compiled(base.pristine_config))
        config = self._config(base, num_blocks) if model is None else model.config
        partition = layer_partition([stop - first for first, stop in ranges])
        with partition, active_lane(active, group, config):
            if model is None:
                model = self._build(base, group, config, num_layers * sizes.block_bytes)
            scheduler = build_scheduler(base, model) if rank == 0 else None
        self.tiers = model.tiers
        self._host_rows, self._beyond = own_rows, []
        self._view: KvView | None = None
        self.inbox = HiddenInbox()
        self._codec_of_hidden = HiddenCodec(model.runner.model, base.worker.device)
        self._hidden: HiddenWay = self._codec_of_hidden
        self.max_in_flight = num_stages  # leader: microbatches, where members share no processors
        self._in_flight = deque()
        self._clock = clock or StageClock()
        self._counted_s = self._clock.busy_s, self._clock.idle_s  # of the clock, which other lanes have too
        self._stage_s = 0.0  # leader: of its stage, for the newest microbatch
        self._was_empty = True  # leader: nothing was to compute since the newest microbatch
        self._arriving, self._arriving_parked, self._ended, self._withheld = {}, set(), [], []
        self._told_uses: ToldUses | None = None  # follower, where there is a host tier
        self._lane_tiers: LaneTiers | None = None
        self._is_settled, self._is_exchanging = True, False
        super().__init__(
            base,
            active,
            group,
            rank=rank,
            model=model,
            scheduler=scheduler,
            capacity=replace(
                base.capacity,
                num_blocks=num_blocks,
                bytes_per_block=sizes.num_layers * sizes.block_bytes,
                max_model_len=config.model_config.max_model_len,
                max_num_seqs=config.scheduler_config.max_num_seqs,
            ),
        )
        self._microbatches: Microbatches | None = None
        if self.tiers is not None:
            self._open_tiers(self.tiers)
        if self.leads:
            self._microbatches = Microbatches(
                self.scheduler, num_stages, cost_model, policy, self._chunks, self._shorts
            )
            self.scheduler.watch_frees(self._note_freed)

    def _config(self, base: DpLane, num_blocks: int) -> VllmConfig:
        block_size = base.capacity.block_size
        config = group_config(base, pp=len(self.stages), rank=self.stage, block_size=block_size, num_blocks=num_blocks)
        model = config.model_config
        model.max_model_len = min(model.max_model_len, self.sizes.longest_blocks * block_size)
        return config

    def _build(self, base: DpLane, group: LaneGroup, config: VllmConfig, block_bytes: int) -> LaneModel:
        if base.tiers is None:
            return build_model(base, group, config, share_layers, block_bytes, self._memory.kv)
        tiers = StageTiers(base.tiers, self._memory, self.sizes, self.stage, base.capacity.block_size)
        first = self.layers[0]
        model = build_model(
            base, group, config, share_layers, block_bytes, lambda layer: tiers.kv.pool.layer(layer - first)
        )
        names = list(model.runner.get_kv_cache_spec())
        TierRunner(model.runner, tiers.kv, names, config.cache_config.block_size)
        return replace(model, tiers=tiers)

    def _open_tiers(self, tiers: StageTiers) -> None:
        self._lane_tiers = LaneTiers(
            tiers.kv,
            physical=self.table.physical,
            num_members=self.num_stages,
            stages=self.stages,
            stage=self.stage,
        )
        if self.leads:
            self._lane_tiers.tell_others()
            self.residency = ResidentRequests(self.scheduler, self._lane_tiers, 0, _Supply(self), progress=self)
            self.limit(self.sizes.smallest)
        else:
            num_blocks = tiers.kv.placement.num_blocks
            self._told_uses = ToldUses(lambda: np.zeros(num_blocks, dtype=np.uint8), self.table, num_blocks)

    def assume(self, cost_model: CostModel) -> None:
        """Takes `cost_model`, of steps of the whole model, for true until microbatches say otherwise."""
        if self._microbatches is not None:
            self._microbatches.assume(cost_model)

    @property
    def num_stages(self) -> int:
        """Stages, one a member."""
        return self.group.world_size

    @property
    def num_in_flight(self) -> int:
        """Leader: microbatches whose tokens have not come back."""
        return len(self._in_flight)

    # Shape ------------------------------------------------------------------------------------------------------------

    def enter(self, run: GroupRun) -> None:
        """Makes this the lane that vLLM's code sees, with an empty pipeline."""
        super().enter(run)
        self._hidden = self._way_of(run)
        if self._lane_tiers is not None:
            self._lane_tiers.watch(self._uses, self._told_uses)
        self._was_empty = self._is_settled = True
        self._clock.forget()
        self._counted_s = self._clock.busy_s, self._clock.idle_s
        if self.stage > 0 and self.runner.intermediate_tensors is None:
            scheduler = self.config.scheduler_config
            self.runner.intermediate_tensors = self.runner.model.make_empty_intermediate_tensors(
                batch_size=scheduler.max_num_batched_tokens,
                dtype=self.config.model_config.dtype,
                device=self.base.worker.device,
            )

    def _uses(self) -> np.ndarray:
        """Leader: what this member's blocks are used for. Those that a microbatch under way has still are held."""
        assert self.tiers is not None
        uses = self.scheduler.uses()
        uses[list(spared_blocks(self._in_flight))] = Use.HELD
        return uses_of(np.zeros(self.tiers.kv.placement.num_blocks, dtype=np.uint8), self.table.backing(), uses)

    def _way_of(self, run: GroupRun) -> HiddenWay:
        """From device to device where the group's communicator does that: all members have the same kind."""
        if not run.communicator.posts:
            return self._codec_of_hidden
        before, after = (rank_of((self.stage + step) % self.num_stages, self.num_stages) for step in (-1, 1))
        return DeviceHidden(self._codec_of_hidden, run.communicator, before, after)

    def leave(self) -> None:
        """Gives vLLM's code back to `dp`. Forgets microbatches in flight, and cached prefixes: their bytes go."""
        super().leave()
        self._in_flight.clear()
        self._arriving.clear()
        self._arriving_parked.clear()
        self._ended.clear()
        self._is_exchanging = False
        if not self._keeps_inputs:
            self.runner.intermediate_tensors = None
        if self.leads:
            self.offer_all()
            self.scheduler.offer(self._beyond)
            self._beyond = []
            self.scheduler.offer(self.scheduler.withhold(self.num_free()))
        self.give_up_host()
        if self.residency is not None:
            self.residency.unsettle()

    def check_memory(self, memory: LayerMemory) -> Sequence[str]:
        """Laws of the memory that KV and weights share while this lane runs, as sentences where one is broken."""
        wrong = self.tiers.check() if self.tiers is not None else ()
        if not self._is_settled:
            return (*wrong, *memory.check_chunks())
        return (*wrong, *memory.check(self.layers, memory.sizes.num_blocks(self.layers)))

    def kv(self, dp_view: KvView) -> LaneKv:
        """This member's layers; blocks are as large as those of `dp`."""
        share = KvShare(self.layers, (0, dp_view.layout.num_heads))
        if self._view is None:
            layers, dtype = range(*self.layers), dp_view.dtype
            if self.tiers is None:
                self._view = KvView([self._memory.kv(layer).view(dtype) for layer in layers], dp_view.layout)
            else:
                kv = self.tiers.kv
                device = [kv.pool.layer(layer).view(dtype) for layer in range(len(layers))]
                self._view = TieredKvView(device, self.tiers.rows.cells.view(dtype), dp_view.layout, kv)
        return LaneKv(self._view, share, dp_view.layout.num_tokens, self.table.physical)

    # Steps ------------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether a microbatch is in flight or another one may begin."""
        return bool(self._in_flight) or super().has_work()

    def step(self) -> Mapping[int, EngineCoreOutputs]:
        """Leader: keeps the pipeline full, and finishes the microbatch that has been in it for longest."""
        while not self._is_held and len(self._in_flight) < self.max_in_flight and self._begin():
            pass
        if not self._in_flight:
            return {}
        is_full = len(self._in_flight) >= self.max_in_flight
        microbatch = self._in_flight.popleft()
        self._learn(microbatch.forgotten, microbatch.known)
        # Not when it began: vLLM has one buffer for the masks of all microbatches. Its requests' grammars stand where
        # they stood then, and this member alone samples.
        grammar = self.scheduler.grammar_bitmask(microbatch.output)
        with self._learning(microbatch.output):
            result = self._execute(microbatch, grammar)
        assert self._microbatches is not None
        self._microbatches.came_back(microbatch.output, chunks_of(microbatch.output), self._stage_s)
        if self._slo_gate is not None and self._slo_gate.is_on:
            self._slo_gate.learn(self._stage_s, prompt_tokens_of(microbatch.output), self.max_in_flight)
        outputs = self.scheduler.update(microbatch.output, result)
        # Every stage takes about what this one does. Idle time between microbatches counts where as many were in flight
        # as may be: with fewer, stages wait for work.
        (busy_s, idle_s), self._counted_s = self._counted_s, (self._clock.busy_s, self._clock.idle_s)
        seconds = self._clock.busy_s - busy_s + (self._clock.idle_s - idle_s if is_full else 0.0)
        self._count(outputs.values(), seconds * self.num_stages, self.max_in_flight)
        if not self._in_flight and (self._is_held or not self.scheduler.has_unfinished):
            self._was_empty = True
        return outputs

    @contextmanager
    def _learning(self, output: SchedulerOutput) -> Iterator[None]:
        """Around a microbatch's last stage: what placements are planned with follows what it took."""
        placement, tiers = self._slo_placement, self._lane_tiers
        if placement is None or tiers is None or not placement.is_on or prompt_tokens_of(output):
            yield
            return
        stall_s, num_staged = tiers.stall_s, tiers.num_staged_steps
        yield
        if output.total_num_scheduled_tokens:
            took_s, stalled_s = self._stage_s, tiers.stall_s - stall_s
            placement.after(
                took_s * self.max_in_flight,  # until each request has its next token
                stalled_s * self.max_in_flight,
                is_staged=tiers.num_staged_steps > num_staged,
            )

    def _limiting(self) -> AbstractContextManager[None]:
        """Of the next microbatch, what keeps prompts back that would break another request's SLO."""
        gate = self._slo_gate
        return gate.limiting() if gate is not None and gate.is_on else FREE

    def _begin(self) -> bool:
        """Makes and sends the next microbatch; False where there is nothing for it."""
        output = self._schedule()
        if not self._in_flight:
            self._recompute_if_stuck(output)
        if not (output.total_num_scheduled_tokens or output.finished_req_ids or self._known):
            return False
        hints, uses = self._lane_tiers.take_hints() if self._lane_tiers is not None else (), self._uses_to_tell()
        parts = self._codec.encode(
            output, None, (), self._forgotten, self._known, is_first=self._was_empty, hints=hints, uses=uses
        )
        self.run.send_step(parts)
        self._in_flight.append(Microbatch(output, self._was_empty, self._forgotten, self._known))
        self._forgotten, self._known = [], []
        if output.total_num_scheduled_tokens:
            self._was_empty = False
        return True

    def _schedule(self) -> SchedulerOutput:
        """The next microbatch; with a host tier, of what the devices can hold."""
        assert self._microbatches is not None
        in_flight = [other.output for other in self._in_flight]
        with self._hurrying():
            if self._slo_placement is not None and self._slo_placement.is_on:
                self._slo_placement.before()
            may_step = self.residency.may_step if self.residency is not None else ANY
            with self._resident(), self._limiting():
                return self._microbatches.schedule(in_flight, self.max_in_flight, may_step)

    def _uses_to_tell(self) -> bytes:
        if self._lane_tiers is None or self.residency is None:
            return b""
        return self._lane_tiers.uses_to_tell(self.scheduler.uses, has_chosen=self.residency.has_chosen)

    def follow(self, parts: Sequence[Buffer]) -> None:
        """Follower: runs its layers over a microbatch, and hands on what comes out."""
        step = self._codec.decode(parts)
        if self._lane_tiers is not None and self._told_uses is not None:
            self._told_uses.hear(step.uses)
            self._lane_tiers.hear(step.hints)
        self._learn(step.forgotten, step.known)
        self._totals.steps += 1
        self._execute(Microbatch(step.output, step.is_first))

    def _execute(self, microbatch: Microbatch, grammar: GrammarOutput | None = None) -> Any:
        output, num_tokens = self._placed(microbatch.output), microbatch.output.total_num_scheduled_tokens
        if self._told_uses is not None:
            self._told_uses.hold(blocks_begun(output))
        hidden: IntermediateTensors | None = None
        order_before: Buffer | None = None
        if num_tokens and self.stage > 0:
            order_before, *parts = self.inbox.get(self.run.stamp, self.run.timeout_s)
            hidden = self._hidden.decode(parts, num_tokens)
        if num_tokens:
            self._clock.begin(is_first=microbatch.is_first)
        with set_current_vllm_config(self.config), torch.inference_mode():
            result = self.runner.execute_model(output, hidden)
            order = order_of(self.runner)
            if order_before is not None:
                require_order(order_before, order)
            if result is None:
                result = self.runner.sample_tokens(grammar)
        if num_tokens:
            is_last = self.stage == self.num_stages - 1
            parts = [] if is_last else self._hidden.encode(result, num_tokens)
            self._hidden.require_whole()
            self._stage_s = self._clock.end()
            if not is_last:
                self.run.send(rank_of(self.stage + 1, self.num_stages), HIDDEN, [order, *parts])
        return result
