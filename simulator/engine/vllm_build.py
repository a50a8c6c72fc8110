"""vLLM's own scheduler and KV cache manager without an engine: no model, no device, no files."""

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
    Scheduler,
    SchedulerConfig,
)
from pengserve.simulator.engine.options import SchedulerOptions


class _NoGrammars:
    """In place of vLLM's manager of structured output: no request has any."""

    def accept_tokens(self, request: object, token_ids: object) -> bool:
        """See vLLM."""
        return True


def build_vllm_scheduler(capacity: KvCapacity, options: SchedulerOptions) -> Any:
    """vLLM's scheduler over a pool of `capacity.num_blocks` blocks.

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
    kind = Scheduler if options.lookahead is not None else _Terse
    return kind(
        vllm_config=_vllm_config(capacity, options),
        kv_cache_config=kv_config,
        structured_output_manager=_NoGrammars(),
        block_size=capacity.block_size,
        log_stats=False,
    )


class _Terse(Scheduler):  # type: ignore[misc]
    """Leaves out what it would tell a runner: a third of a step's time, and none of its decisions."""

    def _make_cached_request_data(self, *args: object) -> None:
        return None


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
        max_in_flight_tokens=options.num_stages * options.max_num_batched_tokens,
        max_concurrent_batches=options.num_stages,
        use_v2_model_runner=True,  # its outputs name requests, where V1's repeat all their tokens
    )
