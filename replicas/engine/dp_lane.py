"""The `dp` lane: the ordinary vLLM engine of one instance, and requests that come to it half decoded."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import ConfigError
from pengserve.planners.types.snapshot import InstanceStats, KvCapacity
from pengserve.replicas.engine.vllm_seam import (
    AsyncEngineArgs,
    EngineCore,
    EngineCoreEventType,
    EngineCoreOutputs,
    EngineCoreRequest,
    Executor,
    Request,
    RequestStatus,
    UsageContext,
)
from pengserve.replicas.engine.worker import worker_class_name

logger = logging.getLogger(__name__)

OWN_ARGUMENTS = ("model", "worker_cls", "data_parallel_size")


def engine_arguments(config: InstanceConfig) -> dict[str, Any]:
    """vLLM engine arguments of an instance: the user's, with PengServe's defaults where the user gave none.

    Raises:
        ConfigError: an argument that PengServe sets itself, or that vLLM does not have; or no such model.
    """
    own = [name for name in OWN_ARGUMENTS if name in config.engine]
    if own:
        raise ConfigError(f"engine.{own[0]} is set by PengServe; leave it out of `engine:`")
    unknown = sorted(set(config.engine) - set(AsyncEngineArgs.__dataclass_fields__))
    if unknown:
        raise ConfigError(f"engine.{unknown[0]} is no vLLM engine argument; see `vllm serve --help` for their names")
    if Path(config.model).is_absolute() and not Path(config.model).is_dir():
        raise ConfigError(f"the model directory {config.model} does not exist on this machine")
    defaults: dict[str, Any] = {
        "async_scheduling": False,
        "enable_prefix_caching": True,
        "mm_processor_cache_gb": 0,  # vLLM's is a pair of mirrors, one engine to one frontend; here are several of both
    }
    if config.device == "cpu":
        defaults |= {"enforce_eager": True}
        if not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & set(config.engine):
            defaults["kv_cache_memory_bytes"] = 256 << 20
    return defaults | dict(config.engine) | {"model": config.model}


class DpLane:
    """vLLM's scheduler and runner, stepped by one thread.

    `prepare` may be called from one other thread; everything else belongs to the thread that steps.
    """

    def __init__(self, config: InstanceConfig) -> None:
        """Loads the model and allocates its KV cache.

        Raises:
            ConfigError: an engine argument is not usable.
        """
        arguments = AsyncEngineArgs(**engine_arguments(config), worker_cls=worker_class_name(config.device))
        vllm_config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        self._log_stats = not arguments.disable_log_stats
        self._core = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=self._log_stats)
        self._step_core = self._core.step_fn
        self._scheduler: Any = self._core.scheduler
        self._pool = self._scheduler.kv_cache_manager.block_pool
        kv_config = self._scheduler.kv_cache_config
        self._num_kv_groups = len(kv_config.kv_cache_groups)
        self._steps = self._resumed = self._generated = self._prompted = self._preempted = 0
        self._prefix_queries = self._prefix_hits = 0
        self._queued: tuple[tuple[int, int, int], int] = ((0, 0, 0), 0)
        self._added = 0
        self.capacity = KvCapacity(
            num_blocks=kv_config.num_blocks - 1,  # vLLM keeps block 0 as the null block
            block_size=vllm_config.cache_config.block_size,
            bytes_per_block=sum(tensor.size for tensor in kv_config.kv_cache_tensors) // kv_config.num_blocks,
            max_model_len=vllm_config.model_config.max_model_len,
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
            weight_bytes=self._core.model_executor.collective_rpc("weight_bytes")[0],
        )

    def prepare(
        self, request: EngineCoreRequest, output_token_ids: Sequence[int], then: Callable[[Request], None]
    ) -> None:
        """Hashes the prompt's blocks and starts compiling its grammar; calls `then` when `add` may be called.

        With output tokens the grammar is first led through them, so that it stands where the lost instance's stood.
        """
        prepared, _ = self._core.preprocess_add_request(request)
        if not output_token_ids:
            then(prepared)
            return
        structured = prepared.structured_output_request
        if structured is None:
            prepared.append_output_token_ids(list(output_token_ids))
            then(_as_preempted(prepared))
            return

        def replay(_: object) -> None:
            # A grammar that does not compile stays WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: the scheduler fails it.
            if not isinstance(structured.grammar, Exception):
                for token_id in output_token_ids:
                    prepared.append_output_token_ids(token_id)
                    self._core.structured_output_manager.accept_tokens(prepared, [token_id])
                _as_preempted(prepared)
            then(prepared)

        structured._grammar.add_done_callback(replay)

    def add(self, request: Request) -> None:
        """Gives a prepared request to the scheduler. One that was running elsewhere goes to the head of the queue."""
        self._added += 1
        if request.status is not RequestStatus.PREEMPTED:
            self._core.add_request(request)
            return
        self._resumed += 1
        self._core.model_executor.collective_rpc("adopt_request", args=(request, self._num_kv_groups))
        self._core.add_request(request)
        self._scheduler.waiting.remove_request(request)
        self._scheduler.waiting.prepend_request(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forgets requests; unknown ids are left alone. Their blocks are free at once."""
        self._core.abort_requests(list(request_ids))

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._scheduler.has_requests() or bool(self._core.batch_queue)

    def num_requests(self) -> int:
        """Running and waiting requests."""
        running, waiting = self._scheduler.get_request_counts()
        return running + waiting

    def step(self) -> Mapping[int, EngineCoreOutputs]:
        """Schedules, executes and samples one step; outputs by client index."""
        outputs, executed = self._step_core()
        self._core.post_step(executed)
        self._steps += 1
        for batch in (outputs or {}).values():
            self._count(batch)
        return outputs or {}

    def stats(self, last_step_s: float = 0.0) -> InstanceStats:
        """Load after the last step."""
        running, waiting = self._scheduler.get_request_counts()
        return InstanceStats(
            step=self._steps,
            num_running=running,
            num_waiting=waiting,
            kv_blocks_used=self.capacity.num_blocks - self._pool.get_num_free_blocks(),
            queued_tokens=self._queued_tokens(waiting),
            total_prompt_tokens=self._prompted,
            total_generated_tokens=self._generated,
            total_preemptions=self._preempted,
            total_prefix_queries=self._prefix_queries,
            total_prefix_hits=self._prefix_hits,
            total_resumed=self._resumed,
            last_step_s=last_step_s,
        )

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False while requests hold blocks."""
        return bool(self._scheduler.reset_prefix_cache())

    def close(self) -> None:
        """Frees the model, its memory and its process groups."""
        self._core.shutdown()

    def _queued_tokens(self, num_waiting: int) -> int:
        """Tokens that waiting requests have; counted again only when the queue has changed."""
        if not num_waiting:
            return 0
        version = (num_waiting, self._added, self._preempted)
        if self._queued[0] != version:
            self._queued = (version, sum(request.num_tokens for request in self._scheduler.waiting))
        return self._queued[1]

    def _count(self, batch: EngineCoreOutputs) -> None:
        for output in batch.outputs:
            self._generated += len(output.new_token_ids)
            if output.prefill_stats is not None:
                self._prompted += output.prefill_stats.num_prompt_tokens
            if output.events:
                self._preempted += sum(event.type is EngineCoreEventType.PREEMPTED for event in output.events)
        stats = batch.scheduler_stats
        if stats is not None and stats.prefix_cache_stats is not None:
            self._prefix_queries += stats.prefix_cache_stats.queries
            self._prefix_hits += stats.prefix_cache_stats.hits


def _as_preempted(request: Request) -> Request:
    """Marks a half-decoded request as the scheduler marks one that it has preempted."""
    request.status = RequestStatus.PREEMPTED
    request.num_preemptions = 1
    request.prefill_stats = None  # its first prefill was counted where it began
    return request
