"""The one table of vLLM names that `replicas` uses. An upgrade that moves one fails its test with a sentence.

vLLM is pinned to 0.32; public names need no entry, but for those of the simulator, which has vLLM from here
alone. `ATTRIBUTES` lists members that are read or called on objects of these classes, so that a rename inside a class
is seen as well.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence

from vllm import SamplingParams, envs
from vllm.config import (
    CacheConfig,
    CompilationMode,
    CUDAGraphMode,
    ObservabilityConfig,
    SchedulerConfig,
    StructuredOutputsConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.utils import get_pp_indices
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.sequence import IntermediateTensors
from vllm.usage.usage_lib import UsageContext
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, set_default_torch_dtype
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar
from vllm.v1.worker.block_table import BlockTable, MultiGroupBlockTable
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker as GPUWorker
from vllm.v1.worker.utils import bind_kv_cache

__all__ = [
    "ATTRIBUTES",
    "STR_DTYPE_TO_TORCH_DTYPE",
    "AsyncEngineArgs",
    "BlockPool",
    "BlockTable",
    "CUDAGraphMode",
    "CacheConfig",
    "CachedRequestData",
    "CachedRequestState",
    "ColumnParallelLinear",
    "CompilationMode",
    "EngineCore",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "Executor",
    "FinishReason",
    "FullAttentionSpec",
    "GPUWorker",
    "GrammarOutput",
    "IntermediateTensors",
    "KVCacheBlock",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "LinearBase",
    "MergedColumnParallelLinear",
    "ModelRunnerOutput",
    "MsgpackDecoder",
    "MsgpackEncoder",
    "MultiGroupBlockTable",
    "NewRequestData",
    "ObservabilityConfig",
    "PPMissingLayer",
    "ParallelLMHead",
    "PauseState",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "Request",
    "RequestStatus",
    "RowParallelLinear",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulingPolicy",
    "StructuredOutputsConfig",
    "UnquantizedEmbeddingMethod",
    "UnquantizedLinearMethod",
    "UsageContext",
    "VllmConfig",
    "VocabParallelEmbedding",
    "bind_kv_cache",
    "generate_scheduler_kv_cache_config",
    "get_forward_context",
    "get_hash_fn_by_name",
    "get_kv_cache_configs",
    "get_pp_indices",
    "get_request_block_hasher",
    "initialize_model",
    "kv_transfer_state",
    "layer_partition",
    "parallel_state",
    "set_current_vllm_config",
    "set_default_torch_dtype",
]

_PARTITION = "VLLM_PP_LAYER_PARTITION"  # sizes of the stages, by commas

ATTRIBUTES: dict[type, tuple[str, ...]] = {
    VllmConfig: ("use_v2_model_runner",),
    EngineCore: (
        "preprocess_add_request",  # EngineCoreRequest -> Request, with block hashes and grammar; thread-safe
        "add_request",
        "abort_requests",
        "step",
        "step_with_batch_queue",
        "post_step",
        "shutdown",
    ),
    Executor: ("get_class", "collective_rpc", "shutdown"),
    BlockPool: ("get_new_blocks", "free_blocks", "get_num_free_blocks", "evict_blocks", "_maybe_evict_cached_block"),
    KVCacheManager: ("allocate_slots", "cache_blocks", "get_block_ids", "get_blocks", "free"),
    Scheduler: (
        "has_requests",
        "get_request_counts",
        "finish_requests",
        "reset_prefix_cache",
        "schedule",
        "get_grammar_bitmask",
        "update_from_output",
        "set_pause_state",
        "_make_cached_request_data",  # what it builds is for a runner, and no decision stands on it
        "_update_request_with_output",  # appends tokens, and says whether the request has ended
        "_free_request",
        "_preempt_request",  # (request, timestamp), of one that `running` has no more: it waits, and holds nothing
        "_enqueue_waiting_request",  # puts a request that holds KV where it is scheduled first
    ),
    RequestQueue: ("add_request", "remove_requests", "prepend_request", "peek_request"),
    SchedulingPolicy: ("PRIORITY",),
    SchedulerOutput: ("make_empty",),
    Request: (
        "update_block_hashes",
        "append_output_token_ids",
        "from_engine_core_request",
        "record_event",
        "num_output_tokens",
    ),
    RequestStatus: ("PREEMPTED", "WAITING", "FINISHED_ABORTED"),
    StructuredOutputManager: ("accept_tokens", "grammar_init", "_create_grammar"),
    StructuredOutputBackend: ("allocate_token_bitmask",),
    StructuredOutputGrammar: (
        "accept_tokens",
        "validate_tokens",
        "fill_bitmask",
        "rollback",
        "is_terminated",
        "reset",
    ),
    GPUModelRunner: (
        "_update_states",
        "_init_mrope_positions",
        "initialize_kv_cache",
        "initialize_kv_cache_tensors",
        "get_kv_cache_spec",
        "execute_model",
        "sample_tokens",
        "capture_model",  # CUDA graphs of all sizes
        "profile_run",  # runs dummy tokens without attention: compiles the model, and shows the peak of activations
        "_model_forward",  # within the forward context: the one place where layers' tables can be exchanged
        "_prepare_inputs",
        "_build_attention_metadata",
    ),
    KVConnectorBase_V1: (  # around each attention, while `kv_transfer_state._KV_CONNECTOR_AGENT` is one
        "wait_for_layer_load",
        "save_kv_layer",
        "has_connector_metadata",
    ),
    GPUWorker: ("init_device", "execute_model", "load_model", "determine_available_memory"),
    InputBatch: ("add_request", "remove_request", "req_ids"),
    BlockTable: ("compute_slot_mapping", "get_device_tensor"),
    MultiGroupBlockTable: ("commit_block_table",),  # before each step: kernels read what it has written
}


@contextlib.contextmanager
def layer_partition(sizes: Sequence[int]) -> Iterator[None]:
    """Within it, vLLM builds models whose stages have so many layers, in their order.

    vLLM is told by its environment, whose values it keeps once an engine runs: so it has to read them anew.
    """
    before, is_cached = os.environ.get(_PARTITION), hasattr(envs.__getattr__, "cache_clear")
    envs.disable_envs_cache()
    os.environ[_PARTITION] = ",".join(map(str, sizes))
    try:
        yield
    finally:
        del os.environ[_PARTITION]
        if before is not None:
            os.environ[_PARTITION] = before
        if is_cached:
            envs.enable_envs_cache()
