"""vLLM's own scheduler and KV cache manager without an engine: no model, no device, no files."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from pengserve.planners.types.errors import ConfigError
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.engine.vllm_seam import (
    STR_DTYPE_TO_TORCH_DTYPE,
    CacheConfig,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    ObservabilityConfig,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
)
from pengserve.simulator.engine.options import SchedulerOptions


class _NoGrammars:
    """In place of vLLM's manager of structured output: no request has any."""

    def accept_tokens(self, request: object, token_ids: object) -> bool:
        """Accepts all tokens."""
        return True


def build_vllm_scheduler(capacity: KvCapacity, options: SchedulerOptions, is_terse: bool = True) -> Any:
    """vLLM's scheduler over a pool of `capacity.num_blocks` blocks.

    Args:
        is_terse: a `TerseScheduler`, which decides the same in half the time.

    Raises:
        ConfigError: vLLM cannot be set so.
    """
    if options.max_num_batched_tokens < capacity.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {options.max_num_batched_tokens}: vLLM needs at least max_num_seqs,"
            f" {capacity.max_num_seqs}"
        )
    if options.preemption != "recompute":
        raise ConfigError("vLLM's scheduler preempts by recompute alone: choose that, or the fast scheduler")
    # The largest block id is `num_blocks`: vLLM keeps block 0 as the null block.
    spec = FullAttentionSpec(
        block_size=capacity.block_size, num_kv_heads=1, head_size=64, dtype=STR_DTYPE_TO_TORCH_DTYPE["bfloat16"]
    )
    kv_config = KVCacheConfig(
        num_blocks=capacity.num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    scheduler = (TerseScheduler if is_terse else Scheduler)(
        vllm_config=_vllm_config(capacity, options),
        kv_cache_config=kv_config,
        structured_output_manager=_NoGrammars(),
        block_size=capacity.block_size,
        log_stats=False,
    )
    if is_terse and not options.prefix_caching:
        manager = scheduler.kv_cache_manager
        manager.allocate_slots = _without_full_blocks(manager)
    return scheduler


class TerseScheduler(Scheduler):
    """Decides by vLLM's own code, and leaves out what it would tell a runner and its clients: half of a step's time."""

    running: list[Any]
    is_told_apart = False  # whether outputs must say what each request has computed, as `Microbatches` asks

    def _make_cached_request_data(self, *args: Any) -> Any:
        return super()._make_cached_request_data(*args) if self.is_told_apart else None

    def give(self, output: Any, sampled: Sequence[Sequence[int]]) -> None:
        """`update_from_output` of one-token outputs without logprobs, connectors, grammars and stop strings.

        Args:
            sampled: tokens by request, in the order of `output.num_scheduled_tokens`; none where its prompt goes on.
        """
        ran, waited = set[Any](), set[Any]()
        for (request_id, num_tokens), tokens in zip(output.num_scheduled_tokens.items(), sampled, strict=True):
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.num_in_flight_tokens -= num_tokens
            if request.num_stale_output_tokens > 0:
                request.num_stale_output_tokens -= num_tokens
            if not tokens:
                continue
            if len(request._output_token_ids) + 1 < request.max_tokens:
                request.append_output_token_ids(tokens[0])
                continue
            (ran if request.status is RequestStatus.RUNNING else waited).add(request)
            self._update_request_with_output(request, list(tokens))
            self._free_request(request)
        if ran:
            self.running = [request for request in self.running if request not in ran]
        if waited:
            self.waiting.remove_requests(waited)
            self.deferred_waiting.difference_update(waited)


def _without_full_blocks(manager: Any) -> Callable[..., Any]:
    """`allocate_slots` that returns at once where a running request's blocks hold its new tokens as well.

    vLLM comes to the same end: no block is needed, and without prefix caching none is cached.
    """
    allocate, nothing = manager.allocate_slots, manager.empty_kv_cache_blocks
    (single,) = manager.coordinator.single_type_managers
    held, size = single.req_to_blocks, single.block_size

    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **options: Any) -> Any:
        is_running = request.status is RequestStatus.RUNNING and request.request_id in held
        if is_running and request.num_computed_tokens + num_new_tokens <= len(held[request.request_id]) * size:
            return nothing
        return allocate(request, num_new_tokens, *args, **options)

    return allocate_slots


def _vllm_config(capacity: KvCapacity, options: SchedulerOptions) -> Any:
    """What the scheduler reads of vLLM's configuration. A whole one asks for a model's files."""
    scheduler = SchedulerConfig(
        max_model_len=capacity.max_model_len,
        is_encoder_decoder=False,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=capacity.max_num_seqs,
        policy=options.policy,
        watermark=options.watermark,
        async_scheduling=False,
    )
    cache = CacheConfig(block_size=capacity.block_size, enable_prefix_caching=options.prefix_caching)
    cache.num_gpu_blocks = capacity.num_blocks + 1
    return SimpleNamespace(
        scheduler_config=scheduler,
        cache_config=cache,
        observability_config=ObservabilityConfig(),
        model_config=SimpleNamespace(
            uses_mrope=False,
            is_encoder_decoder=False,
            is_diffusion=False,
            runner_type="generate",
            max_model_len=capacity.max_model_len,
            supports_multimodal_inputs=False,
            return_sampling_mask=False,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_index=0,
        ),
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        speculative_config=None,
        aux_output_config=SimpleNamespace(enabled=False),
        is_mm_encoder_only=False,
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=options.most_in_flight * options.max_num_batched_tokens,
        max_concurrent_batches=options.most_in_flight,
        use_v2_model_runner=True,  # its outputs name requests, where V1's repeat all their tokens
    )
