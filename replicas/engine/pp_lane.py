"""A pipeline lane: vLLM's model of one stage, over the layers that this member keeps (KunServe sections 3 and 4.3).

The leader has the LAST stage, so that tokens are where the scheduler is:

    rank 0, stage s-1   schedule k ........ schedule k+1 .... run its layers of k -> sample -> outputs
    another, stage 0       \\-> run layers of k -> run k+1 ...        /
    another, stage 1             \\-> run k ...   -----hidden------> /

`planners/stages.py` says which rank has which stage. Up to s microbatches are in flight. A request is in one of them at
a time, but for chunks of its prompt; stages run microbatches in the order in which the leader made them.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from pengserve.planners.cost_model import CostModel
from pengserve.planners.stages import Parts, rank_of, stage_layers, stage_of
from pengserve.planners.types.config import MicrobatchPolicy
from pengserve.planners.types.errors import StepError, UnsupportedShapeError
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.dp_lane import DpLane
from pengserve.replicas.engine.group_lane import GroupLane
from pengserve.replicas.engine.group_run import HIDDEN, GroupRun
from pengserve.replicas.engine.hidden import HiddenCodec, HiddenInbox
from pengserve.replicas.engine.kv_shares import KvShare, LaneKv
from pengserve.replicas.engine.lane_build import build_runner, build_scheduler, group_config
from pengserve.replicas.engine.lane_groups import ActiveGroup, LaneGroup
from pengserve.replicas.engine.microbatches import FIRST_MODEL, Microbatches, chunks_of
from pengserve.replicas.engine.shared_model import share_layers
from pengserve.replicas.engine.stage_clock import StageClock
from pengserve.replicas.engine.vllm_seam import (
    EngineCoreOutputs,
    GrammarOutput,
    IntermediateTensors,
    Request,
    SchedulerOutput,
    layer_partition,
    set_current_vllm_config,
)
from pengserve.replicas.memory.kv_views import KvView
from pengserve.replicas.memory.layers import LayerMemory


@dataclass(frozen=True, slots=True)
class _Microbatch:
    output: SchedulerOutput
    is_first: bool  # the pipeline had no work before it


class PpLane(GroupLane):
    """One stage of a pipeline. All of its blocks are there from the start; what backs them comes with the drop."""

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
    ) -> None:
        """Builds the lane beside `base`; takes tens of milliseconds and allocates no weights and no KV.

        Args:
            cost_model: of steps of the whole model, to begin with.
            policy: how microbatches are formed.
            clock: takes the times of this member's stage.

        Raises:
            UnsupportedShapeError: this model cannot be cut into so many stages.
        """
        self.stage, self._memory = stage_of(rank, num_stages), memory
        sizes = memory.sizes
        ranges = stage_layers(sizes.num_layers, num_stages)
        self.stages, self.layers = ranges, ranges[self.stage]
        num_blocks = sizes.num_pipeline_blocks(ranges)
        group = LaneGroup("pp", name, self.stage, num_stages)
        config = group_config(
            base, pp=num_stages, rank=self.stage, block_size=base.capacity.block_size, num_blocks=num_blocks
        )
        before = active.activate(group)
        try:
            partition = layer_partition([stop - first for first, stop in ranges])
            with set_current_vllm_config(config), partition, torch.inference_mode():
                num_layers = self.layers[1] - self.layers[0]
                runner, kv_config = build_runner(base, config, share_layers, num_layers * sizes.block_bytes, memory)
                scheduler = build_scheduler(base, config, kv_config) if rank == 0 else None
        finally:
            active.activate(before)
        if not hasattr(runner.model, "make_empty_intermediate_tensors"):
            raise UnsupportedShapeError(f"{type(runner.model).__name__} cannot be cut into stages")
        self._view: KvView | None = None
        self.inbox = HiddenInbox()
        self._hidden = HiddenCodec(runner.model, base.worker.device)
        self.max_in_flight = num_stages  # leader: microbatches, where members share no processors
        self._in_flight: deque[_Microbatch] = deque()
        self._clock = clock or StageClock()
        self._counted_s = self._clock.busy_s, self._clock.idle_s  # of the clock, which other lanes have too
        self._stage_s = 0.0  # leader: of its stage, for the newest microbatch
        self._was_empty = True  # leader: nothing was to compute since the newest microbatch
        self._arriving: dict[str, Request] = {}  # requests whose KV is on its way
        self._ended: list[str] = []  # those of them that were aborted since
        self._is_settled, self._is_exchanging = True, False
        self._withheld: list[int] = []  # blocks without memory yet, in the order in which it comes
        super().__init__(
            base,
            active,
            group,
            rank=rank,
            config=config,
            runner=runner,
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
        if self.leads:
            self._microbatches = Microbatches(self.scheduler, num_stages, cost_model, policy)

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

    @property
    def is_settled(self) -> bool:
        """Whether this member has all of its memory, and its part of all KV."""
        return self._is_settled

    def note_settled(self, is_settled: bool) -> None:
        """Something that this member misses is on its way to it, or all has come."""
        self._is_settled = is_settled

    @property
    def is_exchanging(self) -> bool:
        """Leader: whether some member waits for KV or memory since the drop."""
        return self._is_exchanging

    # Shape ------------------------------------------------------------------------------------------------------------

    def enter(self, run: GroupRun) -> None:
        """Makes this the lane that vLLM's code sees, with an empty pipeline."""
        super().enter(run)
        self._was_empty = self._is_settled = True
        self._clock.forget()
        self._counted_s = self._clock.busy_s, self._clock.idle_s
        if self.stage > 0:
            scheduler = self.config.scheduler_config
            self.runner.intermediate_tensors = self.runner.model.make_empty_intermediate_tensors(
                batch_size=scheduler.max_num_batched_tokens,
                dtype=self.config.model_config.dtype,
                device=self.base.worker.device,
            )

    def leave(self) -> None:
        """Gives vLLM's code back to `dp`. Forgets microbatches in flight, and cached prefixes: their bytes go."""
        super().leave()
        self._in_flight.clear()
        self._arriving.clear()
        self._ended.clear()
        self._is_exchanging = False
        self.runner.intermediate_tensors = None
        if self.leads:
            self.offer_all()
            self.scheduler.offer(self.scheduler.withhold(self.num_free()))

    def check_memory(self, memory: LayerMemory) -> Sequence[str]:
        """Laws of the memory that KV and weights share while this lane runs, as sentences where one is broken."""
        if not self._is_settled:
            return memory.check_chunks()
        return memory.check(self.layers, memory.sizes.num_blocks(self.layers))

    # Requests whose KV comes while others run ---------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Blocks that have memory."""
        return self.capacity.num_blocks - len(self._withheld)

    def expect(self, request: Request, num_computed_tokens: int) -> list[int] | None:
        """Leader: as `admit`, but the request is not scheduled before `arrived`."""
        block_ids = self._make_room(request, num_computed_tokens)
        if block_ids is not None:
            self._arriving[request.request_id] = request
        return block_ids

    def withhold_free(self) -> list[int]:
        """Leader of a drop: no free block may be handed out before it has memory on all members; their ids.

        `offer` gives them back, the first ones first.
        """
        self._is_exchanging = True
        self._withheld = self.scheduler.withhold(self.num_free())
        return list(self._withheld)

    def give_up_blocks(self, parts: Parts) -> list[int]:
        """Leader: withholds as many free blocks as a restore needs, so that the weights that each member has in its
        part find room; their ids.

        Raises:
            StepError: too many are in use.
        """
        sizes = self._memory.sizes
        count = max(0, self.capacity.num_blocks - (sizes.num_blocks_left(parts) - 1))  # without the null block
        if count > self.num_free():
            raise StepError(f"{count} blocks must be free to bring the weights back, {self.num_free()} are")
        self._withheld = self.scheduler.withhold(count)
        return list(self._withheld)

    def offer(self, count: int) -> None:
        """Leader: `count` more of the withheld blocks have memory on all members."""
        offered, self._withheld = self._withheld[:count], self._withheld[count:]
        self.scheduler.offer(offered)

    def offer_all(self) -> None:
        """Leader: all blocks have memory on all members."""
        self.offer(len(self._withheld))

    def arrived(self) -> None:
        """Leader: all KV and all memory are there."""
        self.offer_all()
        for request in self._arriving.values():
            self.scheduler.enqueue(request)
            self.settle(request)
        self._arriving = {}
        self._is_exchanging = False
        ended, self._ended = self._ended, []
        super().abort(ended)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forgets requests. One whose KV is on its way keeps its blocks until all of that has come: until then members
        write into them, and no other request may have them.
        """
        ids = list(request_ids)
        self._ended += [request_id for request_id in ids if request_id in self._arriving]
        super().abort(request_id for request_id in ids if request_id not in self._arriving)

    def num_requests(self) -> int:
        """Running and waiting requests, and those whose KV is on its way."""
        return super().num_requests() + len(self._arriving)

    # Requests that come and go one by one -----------------------------------------------------------------------------

    def kv(self, dp_view: KvView) -> LaneKv:
        """This member's layers; blocks are as large as those of `dp`."""
        share = KvShare(self.layers, (0, dp_view.layout.num_heads))
        if self._view is None:
            kv = [self._memory.kv(layer).view(dp_view.dtype) for layer in range(*self.layers)]
            self._view = KvView(kv, dp_view.layout)
        return LaneKv(self._view, share, dp_view.layout.num_tokens, self.table.physical)

    def num_written(self, request: Request) -> int:
        """Without the tokens of microbatches in flight: this member's stage has not run them yet."""
        in_flight = sum(other.output.num_scheduled_tokens.get(request.request_id, 0) for other in self._in_flight)
        return super().num_written(request) - in_flight

    def is_between_steps(self, request: Request) -> bool:
        """Whether it is in no microbatch in flight."""
        return request.request_id not in self._ids_in_flight()

    def _ids_in_flight(self) -> Set[str]:
        return {request_id for other in self._in_flight for request_id in other.output.num_scheduled_tokens}

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
        # Not when it began: vLLM has one buffer for the masks of all microbatches. Its requests' grammars stand where
        # they stood then, and this member alone samples.
        grammar = self.scheduler.grammar_bitmask(microbatch.output)
        result = self._execute(microbatch, grammar)
        assert self._microbatches is not None
        self._microbatches.came_back(microbatch.output, chunks_of(microbatch.output), self._stage_s)
        outputs = self.scheduler.update(microbatch.output, result)
        # Every stage takes about what this one does. Idle time between microbatches counts where as many were in flight
        # as may be: with fewer, stages wait for work.
        (busy_s, idle_s), self._counted_s = self._counted_s, (self._clock.busy_s, self._clock.idle_s)
        seconds = self._clock.busy_s - busy_s + (self._clock.idle_s - idle_s if is_full else 0.0)
        self._count(outputs.values(), seconds * self.num_stages, self.max_in_flight)
        if not self._in_flight and (self._is_held or not self.scheduler.has_unfinished):
            self._was_empty = True
        return outputs

    def _begin(self) -> bool:
        """Makes and sends the next microbatch; False where there is nothing for it."""
        assert self._microbatches is not None
        output = self._microbatches.schedule([other.output for other in self._in_flight], self.max_in_flight)
        if not self._in_flight:
            self._recompute_if_stuck(output)
        if not output.total_num_scheduled_tokens and not output.finished_req_ids and not self._known:
            return False
        parts = self._codec.encode(output, None, (), self._forgotten, self._known, is_first=self._was_empty)
        self.run.send_step(parts)
        self._forgotten, self._known = [], []
        self._in_flight.append(_Microbatch(output, self._was_empty))
        if output.total_num_scheduled_tokens:
            self._was_empty = False
        return True

    def follow(self, parts: Sequence[Buffer]) -> None:
        """Follower: runs its layers over a microbatch, and hands on what comes out."""
        step = self._codec.decode(parts)
        self._learn(step.forgotten, step.known)
        self._steps += 1
        self._execute(_Microbatch(step.output, step.is_first))

    def _execute(self, microbatch: _Microbatch, grammar: GrammarOutput | None = None) -> Any:
        hidden: IntermediateTensors | None = None
        output, num_tokens = microbatch.output, microbatch.output.total_num_scheduled_tokens
        if num_tokens and self.stage > 0:
            hidden = self._hidden.decode(self.inbox.get(self.run.stamp, self.run.timeout_s), num_tokens)
        if num_tokens:
            self._clock.begin(is_first=microbatch.is_first)
        with set_current_vllm_config(self.config), torch.inference_mode():
            result = self.runner.execute_model(self._placed(output), hidden)
            if result is None:
                result = self.runner.sample_tokens(grammar)
        if num_tokens:
            self._stage_s = self._clock.end()
            if self.stage < self.num_stages - 1:
                self.run.send(rank_of(self.stage + 1, self.num_stages), HIDDEN, self._hidden.encode(result))
        return result
