"""Lanes of all shapes whose model is a sum: real schedulers, step messages, leases, tables and KV memory, no engine.

The next token follows from the KV of all tokens before it. Each layer and head has its own multiple of it, so that KV
that is missing, stale, at the wrong place, of another layer or of another head shows at once, on each member.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import init_none_hash

from pengserve.planners.stages import stage_layers, stage_of
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.engine.groups.group_lane import GroupLane
from pengserve.replicas.engine.groups.group_run import GroupRun
from pengserve.replicas.engine.groups.pp_lane import PpLane
from pengserve.replicas.engine.groups.step_message import StepCodec
from pengserve.replicas.engine.groups.tp_lane import TpLane
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from pengserve.replicas.engine.lanes.handoff import Handoff, revive
from pengserve.replicas.engine.lanes.kv_shares import KvShare, shares_of
from pengserve.replicas.engine.lanes.lane import Lane
from pengserve.replicas.engine.lanes.lane_build import get_hash_fn_by_name, get_request_block_hasher
from pengserve.replicas.engine.scheduling.block_groups import BlockGroups, blocks_of, grouped
from pengserve.replicas.engine.scheduling.microbatches import FIRST_MODEL, Microbatches
from pengserve.replicas.engine.tiers.stage_tiers import PipelineSizes
from pengserve.replicas.engine.vllm_seam import (
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    Request,
    SchedulerOutput,
)
from pengserve.replicas.kv.table import CellTable
from pengserve.replicas.memory.kv_views import BlockLayout, KvView
from pengserve.replicas.memory.weight_views import Shard
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.vllm_build import build_vllm_scheduler
from tests.support.vllm_requests import sent_request

BLOCK, LAYERS, HEADS, VOCABULARY = 16, 4, 4, 997
BLOCK_BYTES = 2 * BLOCK * LAYERS * HEADS * 8
STEP_TOKENS = 64
HASH = get_hash_fn_by_name("sha256")
init_none_hash(HASH)


def a_request(name: str, num_prompt: int, max_tokens: int, *, family: str = "") -> EngineCoreRequest:
    """A request whose prompt follows from its name, or from that of its family: then it shares a prefix with others."""
    source, own = random.Random(family or name), random.Random(name)
    num_shared = num_prompt - 3 if family else num_prompt
    prompt = [source.randrange(VOCABULARY) for _ in range(num_shared)]
    prompt += [own.randrange(VOCABULARY) for _ in range(num_prompt - num_shared)]
    return sent_request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def value_of(token: int, position: int) -> int:
    """What a token adds to the sum."""
    return (token + 1) * (position + 1)


def true_tokens(request: EngineCoreRequest) -> list[int]:
    """The only right answer."""
    known = list(request.prompt_token_ids or ())
    assert request.sampling_params is not None and request.sampling_params.max_tokens
    total = sum(value_of(token, place) for place, token in enumerate(known))
    answer: list[int] = []
    for _ in range(request.sampling_params.max_tokens):
        answer.append(total % VOCABULARY)
        total += value_of(answer[-1], len(known))
        known.append(answer[-1])
    return answer


# The model ------------------------------------------------------------------------------------------------------------


@dataclass
class State:
    """A request as a runner knows it."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=lambda: [0])  # of the first tokens, by their number

    def total(self, stop: int) -> int:
        """Sum of the first `stop` tokens."""
        for position in range(len(self.sums) - 1, stop):
            self.sums.append(self.sums[-1] + value_of(self.tokens[position], position))
        return self.sums[stop]

    @property
    def block_ids(self) -> BlockGroups:
        """As vLLM's runner names them."""
        return grouped(self.blocks)

    @block_ids.setter
    def block_ids(self, groups: BlockGroups) -> None:
        self.blocks = list(blocks_of(groups))


class SumRunner:
    """One member's part of the model, over its share of the KV. It knows nothing but what steps tell."""

    def __init__(self, view: KvView, share: KvShare) -> None:
        self._view, self._share = view, share
        self._factors = [self._factors_of(layer) for layer in range(*share.layers)]
        self.requests: dict[str, State] = {}
        self.input_batch = SimpleNamespace(req_id_to_index={})

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Computes a step with this member's own blocks. Every member samples."""
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        computed = self._update(output)
        ids, sampled = list(output.num_scheduled_tokens), []
        for request_id, count in output.num_scheduled_tokens.items():
            state, start = self.requests[request_id], computed[request_id]
            stop = start + count
            self._write(state, start, stop)
            token = [self._next(state, stop)] if stop == len(state.tokens) else []
            state.tokens += token
            sampled.append(token)
        return ModelRunnerOutput(ids, {name: index for index, name in enumerate(ids)}, sampled)

    def _update(self, output: SchedulerOutput) -> dict[str, int]:
        """As vLLM's runner takes a step in; computed tokens by request."""
        computed = {}
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.requests, "it is known already"
            self.requests[new.req_id] = State(list(new.prompt_token_ids), list(new.block_ids[0]))
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            state, blocks = self.requests[request_id], cached.new_block_ids[index]
            computed[request_id] = cached.num_computed_tokens[index]
            if request_id in cached.resumed_req_ids:
                state.blocks = list(blocks[0])
            elif blocks is not None:
                state.blocks += blocks[0]
        return computed

    def _write(self, state: State, start: int, stop: int) -> None:
        place, size = self._view.layout.place, self._view.layout.num_tokens
        for position in range(start, stop):
            block, value = state.blocks[position // size], value_of(state.tokens[position], position)
            for index, memory in enumerate(self._view._layers):
                memory[block, place[:, position % size, :, 0]] = value * self._factors[index]

    def _factors_of(self, layer: int) -> torch.Tensor:
        """`[2, heads]` of a layer of the model."""
        heads = torch.arange(*self._share.heads, dtype=torch.float64)
        return 1 + torch.arange(2)[:, None] + 2 * (heads + HEADS * layer)

    def _next(self, state: State, stop: int) -> int:
        place = self._view.layout.place
        total = state.total(stop)
        for index, memory in enumerate(self._view._layers):
            kv = memory[state.blocks][:, place[..., 0]]  # [blocks, 2, tokens, heads]
            sums = kv.transpose(0, 1).flatten(1, 2)[:, :stop].sum(1) / self._factors[index]
            assert (sums == total).all(), f"KV of layer {self._share.layers[0] + index} of {state.blocks} is wrong"
        return total % VOCABULARY

    def adopt(self, request: Request) -> None:
        """Knows a half-decoded request."""
        assert request.request_id not in self.requests, "it was taken twice"
        self.requests[request.request_id] = State(list(request.all_token_ids))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Knows these no more."""
        for request_id in request_ids:
            self.requests.pop(request_id, None)


class KvMemory:
    """KV of one instance, as each shape sees it."""

    def __init__(self, num_blocks: int) -> None:
        self.kv = [torch.full((num_blocks + 1, 2 * HEADS * BLOCK), -1e6, dtype=torch.float64) for _ in range(LAYERS)]

    def view(self, degree: int = 1) -> KvView:
        """Blocks of `degree` times the tokens and a fraction of the heads."""
        place = torch.arange(2 * HEADS * BLOCK).view(2, HEADS // degree, BLOCK * degree, 1).transpose(1, 2)
        return KvView(self.kv, BlockLayout(place))


# Lanes ----------------------------------------------------------------------------------------------------------------


def capacity_of(num_blocks: int, degree: int = 1) -> KvCapacity:
    """Of a lane."""
    return KvCapacity(
        num_blocks=num_blocks,
        block_size=BLOCK * degree,
        bytes_per_block=BLOCK_BYTES,
        max_model_len=num_blocks * BLOCK * degree,
        max_num_seqs=8,
        weight_bytes=0,
    )


def a_scheduler(capacity: KvCapacity, *, is_pipeline: bool = False) -> Any:
    """vLLM's, which talks to a runner of the kind that lanes have."""
    options = SchedulerOptions(max_num_batched_tokens=STEP_TOKENS, prefix_caching=True)
    scheduler = build_vllm_scheduler(capacity, options, is_terse=False)
    scheduler.use_v2_model_runner, scheduler.use_pp = False, is_pipeline
    return scheduler


class SumLane(Lane):
    """An instance alone."""

    lend, take_back, num_held = DpLane.lend, DpLane.take_back, DpLane.num_held

    def __init__(self, num_blocks: int, memory: KvMemory | None = None) -> None:
        capacity = capacity_of(num_blocks)
        hasher = get_request_block_hasher(BLOCK, HASH)
        super().__init__(shape="dp", capacity=capacity, scheduler=a_scheduler(capacity), block_hasher=hasher)
        self.kv_memory = memory or KvMemory(num_blocks)
        self.view = self.kv_memory.view()
        self.runner = SumRunner(self.view, KvShare((0, LAYERS), (0, HEADS)))
        self.num_kv_groups, self._num_lent = 1, 0
        self.tiers = None
        self.pristine_config = SimpleNamespace(speculative_config=None)

    kv, reset_prefix_cache = DpLane.kv, DpLane.reset_prefix_cache

    def step(self) -> Mapping[int, EngineCoreOutputs]:
        output = self.scheduler.schedule()
        return self.scheduler.update(output, self.runner.run(output))

    def unpin(self) -> None:
        """Sessions pin nothing here."""

    def adopt(self, request: Request) -> None:
        self.runner.adopt(request)

    def forget(self, request_ids: Iterable[str]) -> None:
        self.runner.forget(request_ids)

    def revive(self, handoff: Handoff, then: Callable[[Request], None]) -> None:
        then(revive(handoff, 0))

    def append(self, request: Request, output_token_ids: Iterable[int]) -> None:
        request.append_output_token_ids(list(output_token_ids))


class _SumGroupLane(GroupLane):
    """What both kinds have: a runner of sums in place of vLLM's."""

    runner: SumRunner

    def _begin_as(self, name: str, rank: int, size: int, capacity: KvCapacity, scheduler: Any) -> None:
        shape = name.partition("@")[0]
        hasher = get_request_block_hasher(capacity.block_size, HASH)
        Lane.__init__(self, shape=shape, capacity=capacity, scheduler=scheduler, block_hasher=hasher)
        self.rank, self._run, self._is_held = rank, None, False
        self.group: Any = SimpleNamespace(unique_name=name, world_size=size)
        limits = SimpleNamespace(max_num_batched_tokens=STEP_TOKENS)
        self.config: Any = SimpleNamespace(scheduler_config=limits)
        self.table, self._codec = CellTable(capacity.num_blocks + 1), StepCodec()
        self._known, self._forgotten = [], []
        self._active: Any = SimpleNamespace(activate=lambda group: None)
        self.base: Any = SimpleNamespace(contracts=None)

    def adopt(self, request: Request) -> None:
        self.runner.adopt(request)

    def forget(self, request_ids: Iterable[str]) -> None:
        self.runner.forget(request_ids)


class SumTpLane(_SumGroupLane, TpLane):
    """One member of a tensor-parallel group."""

    def __init__(self, dp: SumLane, name: str, rank: int, degree: int, on_lease: Callable[[Any, list[int]], None]):
        num_blocks = dp.capacity.num_blocks
        capacity = capacity_of(num_blocks, degree)
        self._begin_as(name, rank, degree, capacity, a_scheduler(capacity) if rank == 0 else None)
        self.shard, self.on_lease, self._lease = Shard(rank, degree), on_lease, []
        self.kv_view = dp.kv_memory.view(degree)
        self.runner = SumRunner(self.kv_view, shares_of(self.shape, LAYERS, HEADS)[rank])
        self._withheld = self.scheduler.withhold(num_blocks) if self.leads else []
        self.num_lendable = num_blocks

    def _execute(self, output: SchedulerOutput, grammar: Any = None) -> Any:
        return self.runner.run(self._placed(output))


class SumPpLane(_SumGroupLane, PpLane):
    """One stage of a pipeline."""

    def __init__(self, dp: SumLane, name: str, rank: int, num_stages: int, num_blocks: int = 0) -> None:
        """`num_blocks`: where it is another number than that of `dp`; what backs them comes with a drop."""
        capacity = replace(dp.capacity, num_blocks=num_blocks or dp.capacity.num_blocks)
        scheduler = a_scheduler(capacity, is_pipeline=True) if rank == 0 else None
        self._begin_as(name, rank, num_stages, capacity, scheduler)
        self.stages = stage_layers(LAYERS, num_stages)
        self.stage = stage_of(rank, num_stages)
        self.layers = self.stages[self.stage]
        self.tiers = self._lane_tiers = self._told_uses = None
        self._beyond, self._host_rows = [], 0
        self.sizes = PipelineSizes(
            stages=tuple(self.stages),
            device_blocks=(capacity.num_blocks + 1,) * num_stages,
            per_row=0,
            longest_blocks=capacity.num_blocks,
            reserved_blocks=0,
        )
        self._view = dp.view.part(*self.layers)
        self.runner = SumRunner(self._view, KvShare(self.layers, (0, HEADS)))
        self.max_in_flight = num_stages
        self._in_flight, self._withheld, self._arriving, self._ended = deque(), [], {}, []
        self._arriving_parked = set()
        self._is_settled, self._is_exchanging, self._was_empty, self._stage_s = True, False, True, 0.0
        if self.leads:
            self._microbatches = Microbatches(self.scheduler, num_stages, FIRST_MODEL)
            self.scheduler.watch_frees(self._note_freed)
        self._clock, self._counted_s = SimpleNamespace(forget=lambda: None, busy_s=0.0, idle_s=0.0), (0.0, 0.0)

    def _execute(self, microbatch: Any, grammar: Any = None) -> Any:
        return self.runner.run(self._placed(microbatch.output))

    def enter(self, run: GroupRun) -> None:
        GroupLane.enter(self, run)
        self._was_empty = self._is_settled = True

    @property
    def num_stages(self) -> int:
        return int(self.group.world_size)
