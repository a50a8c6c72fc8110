"""A tensor-parallel lane: vLLM's model of one rank over the base lane's weights and KV memory.

    leader:    lease blocks -> schedule -> send the step -> execute -> sample -> outputs
    follower:                              receive it    -> execute -> sample

Every member samples, from the same logits and the same random state, so no token has to be sent.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pengserve.planners.types.errors import UnsupportedShapeError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.dp_lane import DpLane
from pengserve.replicas.engine.lane import Lane, lend, take_back
from pengserve.replicas.engine.lane_groups import ActiveGroup, LaneGroup
from pengserve.replicas.engine.shared_model import check_supported, share_weights
from pengserve.replicas.engine.step_message import ResumedRequest, StepCodec
from pengserve.replicas.engine.vllm_seam import (
    EngineCoreOutputs,
    GrammarOutput,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
    VllmConfig,
    bind_kv_cache,
    generate_scheduler_kv_cache_config,
    get_hash_fn_by_name,
    get_kv_cache_configs,
    get_request_block_hasher,
    initialize_model,
    set_current_vllm_config,
    set_default_torch_dtype,
)
from pengserve.replicas.engine.worker import adopt_request, forget_requests, replayable
from pengserve.replicas.memory.kv_views import KvView, block_layout
from pengserve.replicas.memory.ledger import BlockTable
from pengserve.replicas.memory.weight_views import Shard

LEASE_CHUNK = 16  # blocks; fewer, larger leases keep step messages small


class TpLane(Lane):
    """One rank of a tensor-parallel group. It has no memory of its own: blocks are leased from the `dp` lane."""

    def __init__(
        self,
        base: DpLane,
        active: ActiveGroup,
        name: str,
        shard: Shard,
        on_lease: Callable[["TpLane", list[int]], None],
    ) -> None:
        """Builds the lane beside `base`; takes tens of milliseconds and allocates no weights and no KV.

        Args:
            on_lease: backs new logical blocks of the lane with blocks of `base`.

        Raises:
            UnsupportedShapeError: this model, or this device's attention backend, cannot run in this shape.
        """
        self._base, self._active, self.shard, self.on_lease = base, active, shard, on_lease
        self.group = LaneGroup(name, shard.rank, shard.degree)
        self.factor = kv_factor(base, shard.degree)
        self.config = _lane_config(base, shard, self.factor)
        self._codec = StepCodec()
        before = active.activate(self.group)
        try:
            with set_current_vllm_config(self.config), torch.inference_mode():
                self.runner, kv_config = _build_runner(base, self.config, shard)
                scheduler = self._build_scheduler(kv_config) if shard.rank == 0 else None
        finally:
            active.activate(before)
        self.kv_view = kv_view(self.runner)
        self.table = BlockTable(base.capacity.num_blocks + 1)
        self.on_step: Callable[[Sequence[Buffer]], None] = lambda parts: None  # sends a step to the followers
        self.followers: tuple[InstanceKey, ...] = ()
        self.num_lendable = 0  # blocks that every member could still lend; the leader's knowledge
        self._lease: list[int] = []
        self._known: list[ResumedRequest] = []
        super().__init__(
            shape=f"tp{shard.degree}",
            scheduler=scheduler,
            block_hasher=_block_hasher(base, self.config),
            capacity=_capacity(base, self.config, self.factor),
        )
        # All logical blocks exist from the start; those without a lease are withheld from the scheduler.
        self._withheld = lend(self._pool, base.capacity.num_blocks) if self._pool is not None else []

    def _build_scheduler(self, kv_config: Any) -> Any:
        return Scheduler(
            vllm_config=self.config,
            kv_cache_config=generate_scheduler_kv_cache_config([kv_config]),
            structured_output_manager=self._base.core.structured_output_manager,
            log_stats=self._base.log_stats,
            block_size=self.config.cache_config.block_size,
        )

    # Shape ------------------------------------------------------------------------------------------------------------

    def enter(self, seed: int) -> None:
        """Makes this the lane that vLLM's code sees. `seed` is the same on all members."""
        self._active.activate(self.group)
        self._random_state = torch.get_rng_state()
        torch.manual_seed(seed)

    def leave(self) -> None:
        """Gives vLLM's code back to the `dp` lane."""
        self._active.activate(None)
        torch.set_rng_state(self._random_state)

    # Blocks -----------------------------------------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Blocks that the lane has leased."""
        return self.capacity.num_blocks - len(self._withheld)

    def back(self, logical_ids: Sequence[int], physical_ids: Sequence[int]) -> None:
        """Any member: `logical_ids` stand for these physical blocks from now on."""
        self.table.lease(logical_ids, physical_ids)

    def grow(self, count: int) -> list[int]:
        """Leader: `count` more logical blocks may be handed out; their ids, which every member must `back`."""
        logical_ids, self._withheld = self._withheld[:count], self._withheld[count:]
        take_back(self._pool, logical_ids)
        return logical_ids

    def shrink(self, count: int) -> list[int]:
        """Leader: withdraws up to `count` free blocks; their ids, whose backing every member may release."""
        logical_ids = lend(self._pool, min(count, self.num_free()))
        self._withheld = logical_ids + self._withheld
        return logical_ids

    def shrink_all(self) -> list[int]:
        """Leader: withdraws all free blocks; their ids."""
        return self.shrink(self.num_free())

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(self) -> Mapping[int, EngineCoreOutputs]:
        """Leader: one step of the group."""
        self._lease_ahead()
        output = self._scheduler.schedule()
        self._recompute_if_stuck(output)
        grammar = self._scheduler.get_grammar_bitmask(output)
        self.on_step(self._codec.encode(output, grammar, self._lease, self._known))
        self._lease, self._known = [], []
        result = self._execute(output, grammar)
        outputs: Mapping[int, EngineCoreOutputs] = self._scheduler.update_from_output(output, result)
        self._count(outputs.values())
        return outputs

    def follow(self, parts: Sequence[Buffer]) -> None:
        """Follower: executes a step of the leader's."""
        output, grammar, lease, known = self._codec.decode(parts)
        self.on_lease(self, lease)
        for resumed in known:
            request = Request(resumed.req_id, resumed.prompt_token_ids, resumed.sampling_params, None)
            request.append_output_token_ids(resumed.output_token_ids)
            self.adopt(request)
        self._steps += 1
        self._execute(output, grammar)

    def _execute(self, output: SchedulerOutput, grammar: GrammarOutput | None) -> Any:
        with set_current_vllm_config(self.config), torch.inference_mode():
            result = self.runner.execute_model(self._placed(output))
            return self.runner.sample_tokens(grammar) if result is None else result

    def _placed(self, output: SchedulerOutput) -> SchedulerOutput:
        """The step with this member's physical blocks. The scheduler's own lists stay as they are."""
        place = self.table.physical
        cached = output.scheduled_cached_reqs
        return replace(
            output,
            scheduled_new_reqs=[
                replace(new, block_ids=(place(new.block_ids[0]),)) for new in output.scheduled_new_reqs
            ],
            scheduled_cached_reqs=replace(
                cached, new_block_ids=[None if ids is None else (place(ids[0]),) for ids in cached.new_block_ids]
            ),
        )

    def _lease_ahead(self) -> None:
        """Leases what the next step may need at most, while the members have it."""
        if not self.num_lendable:
            return
        scheduler = self.config.scheduler_config
        waiting = max((request.num_tokens for request in self._scheduler.waiting), default=0)
        tokens = max(scheduler.max_num_batched_tokens, waiting)
        wanted = -(-tokens // self.capacity.block_size) + sum(self._scheduler.get_request_counts())
        missing = wanted - self.num_free()
        if missing > 0:
            count = min(max(missing, LEASE_CHUNK), self.num_lendable, len(self._withheld))
            self._lease = self.grow(count)
            self.on_lease(self, self._lease)
            self.num_lendable -= count

    def _recompute_if_stuck(self, output: SchedulerOutput) -> None:
        """Requests that came with their KV can together leave no block for any of them: one gives up its own."""
        holding = self._scheduler.kv_holding_waiting
        if output.total_num_scheduled_tokens or not holding or self._scheduler.running:
            return
        request = holding.pop_request()
        self._scheduler.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        self._scheduler.waiting.prepend_request(request)

    def longest_tokens(self) -> int:
        """See `Lane`: while it is more than one instance holds, the group cannot be split."""
        return max((request.num_tokens for request in self._scheduler.running), default=0)

    # Requests that come and go ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """See `Lane`. Followers hear of a half-decoded request with the next step."""
        if request.status is RequestStatus.PREEMPTED:
            params, outputs = request.sampling_params, list(request.output_token_ids)
            self._known.append(ResumedRequest(request.request_id, request.prompt_token_ids, params, outputs))
        super().add(request)

    def adopt(self, request: Request) -> None:
        """See `Lane`; on this member's runner."""
        adopt_request(self.runner, request, 1)

    def forget(self, request_ids: Iterable[str]) -> None:
        """See `Lane`; on this member's runner."""
        with set_current_vllm_config(self.config):
            forget_requests(self.runner, request_ids)

    def known_ids(self) -> list[str]:
        """Requests that this member's runner knows."""
        return list(self.runner.requests)


def kv_factor(base: DpLane, degree: int) -> int:
    """By how much a block of degree `degree` holds more tokens than one of `dp` (Flying Serving Eq. 3)."""
    heads: int = base.pristine_config.model_config.get_total_num_kv_heads()
    return min(degree, heads)


def kv_view(runner: Any) -> KvView:
    """The runner's KV of all layers; measures how its attention backend keeps a block."""
    layers = runner.compilation_config.static_forward_context
    names = [name for group in runner.kv_cache_config.kv_cache_groups for name in group.layer_names]
    spec = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    layer = layers[names[0]]

    def write(keys: torch.Tensor, values: torch.Tensor, block: torch.Tensor) -> None:
        slots = torch.arange(spec.block_size, device=block.device)
        cache = block.view(1, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
        layer.impl.do_kv_cache_update(layer, keys.contiguous(), values.contiguous(), cache, slots)

    layout = block_layout(
        write,
        num_heads=spec.num_kv_heads,
        num_tokens=spec.block_size,
        head_size=spec.head_size,
        dtype=spec.dtype,
        device=runner.device,
    )
    return KvView([layers[name].kv_cache.flatten(1) for name in names], layout)


def _lane_config(base: DpLane, shard: Shard, factor: int) -> VllmConfig:
    config = copy.deepcopy(base.pristine_config)
    resolved = base.core.vllm_config
    parallel = config.parallel_config
    parallel.tensor_parallel_size = parallel.world_size = shard.degree
    parallel.rank = shard.rank
    parallel.disable_custom_all_reduce = True
    cache = config.cache_config
    cache.block_size = factor * resolved.cache_config.block_size  # bytes per block stay constant
    cache.num_gpu_blocks = resolved.cache_config.num_gpu_blocks
    cache.kv_cache_layout = resolved.cache_config.kv_cache_layout
    room = factor * base.capacity.num_tokens
    config.model_config.max_model_len = min(config.model_config.max_model_len, room)
    config.compilation_config.static_forward_context = {}
    return config


def _capacity(base: DpLane, config: VllmConfig, factor: int) -> KvCapacity:
    return replace(
        base.capacity,
        block_size=factor * base.capacity.block_size,
        max_model_len=config.model_config.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
    )


def _block_hasher(base: DpLane, config: VllmConfig) -> Any:
    """As `EngineCore` makes its own, in this lane's block size; None where prefix caching is off."""
    if base.core.request_block_hasher is None:
        return None
    return get_request_block_hasher(
        config.cache_config.block_size, get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    )


def _build_runner(base: DpLane, config: VllmConfig, shard: Shard) -> tuple[Any, Any]:
    """A runner of the base runner's class whose model and KV are views; and its KV cache config."""
    base_runner = base.worker.model_runner
    base_model = base_runner.get_model()
    check_supported(base_model)
    for feature, asked in (
        ("speculative decoding", base.worker.vllm_config.speculative_config),
        ("LoRA", base.worker.vllm_config.lora_config),
        ("multi-modal input", base.worker.vllm_config.model_config.multimodal_config),
    ):
        if asked is not None:
            raise UnsupportedShapeError(f"{feature} works in dp alone; leave it out, or leave out `degrees`")
    runner = _runner_class(type(base_runner))(config, base.worker.device)
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        runner.model = initialize_model(config)
    share_weights(runner.model, base_model, shard)
    if base.worker.device.type == "cpu":
        runner._update_states = replayable(runner._update_states, runner)
    specs = runner.get_kv_cache_spec()
    base_groups = base_runner.kv_cache_config.kv_cache_groups
    kinds = {type(spec).__name__ for spec in specs.values()}
    if kinds != {"FullAttentionSpec"} or len(base_groups) != 1:
        raise UnsupportedShapeError(f"KV caches of kind {', '.join(sorted(kinds))} cannot be shared by shapes yet")
    page = next(iter(specs.values())).page_size_bytes
    num_blocks = base.capacity.num_blocks + 1
    if page * len(specs) != base.capacity.bytes_per_block:
        raise UnsupportedShapeError(f"a block would have {page * len(specs)} bytes in tp{shard.degree}")
    kv_config = get_kv_cache_configs(config, [specs], [page * len(specs) * num_blocks])[0]
    kv_config.kv_cache_layout = config.cache_config.kv_cache_layout
    config.cache_config.num_gpu_blocks = kv_config.num_blocks
    runner.arena = {
        name: base.worker.model_runner.compilation_config.static_forward_context[name].kv_cache for name in specs
    }
    runner.initialize_kv_cache(kv_config)
    return runner, kv_config


def _runner_class(base: type) -> type:
    """`base` (vLLM's CPU or GPU runner) with KV in memory that exists already."""

    class SharedKvRunner(base):
        arena: dict[str, torch.Tensor]  # by layer, as another lane sees it

        def initialize_kv_cache_tensors(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            """See vLLM: binds views of the arena instead of allocating."""
            group = kv_cache_config.kv_cache_groups[0]
            spec = group.kv_cache_spec
            shape = (kv_cache_config.num_blocks, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
            views = {name: self.arena[name].view(shape) for name in group.layer_names}
            bind_kv_cache(
                views,
                self.compilation_config.static_forward_context,
                self.kv_caches,
                1,
                kv_cache_groups=kv_cache_config.kv_cache_groups,
            )
            return views

    return SharedKvRunner
