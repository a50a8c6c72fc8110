"""The one table of vLLM names that `replicas` uses. An upgrade that moves one fails its test with a sentence.

vLLM is pinned to 0.32; public names (`vllm.SamplingParams`) need no entry. `ATTRIBUTES` lists members that are
read or called on objects of these classes, so that a rename inside a class is seen as well.
"""

from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.usage.usage_lib import UsageContext
from vllm.utils.torch_utils import set_default_torch_dtype
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
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

__all__ = [
    "ATTRIBUTES",
    "AsyncEngineArgs",
    "CachedRequestState",
    "EngineCore",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "Executor",
    "FinishReason",
    "GPUWorker",
    "MsgpackDecoder",
    "MsgpackEncoder",
    "Request",
    "RequestStatus",
    "Scheduler",
    "UsageContext",
    "initialize_model",
    "set_current_vllm_config",
    "set_default_torch_dtype",
]

ATTRIBUTES: dict[type, tuple[str, ...]] = {
    EngineCore: (
        "preprocess_add_request",  # EngineCoreRequest -> Request, with block hashes and grammar; thread-safe
        "add_request",
        "abort_requests",
        "step",
        "step_with_batch_queue",
        "post_step",
        "shutdown",
    ),
    Scheduler: (
        "has_requests",
        "get_request_counts",
        "finish_requests",
        "reset_prefix_cache",
    ),
    Request: ("append_output_token_ids", "from_engine_core_request", "record_event"),
    RequestStatus: ("PREEMPTED", "WAITING", "FINISHED_ABORTED"),
    StructuredOutputManager: ("accept_tokens", "grammar_init"),
    GPUModelRunner: ("_update_states", "_init_mrope_positions", "initialize_kv_cache"),
    GPUWorker: ("init_device", "execute_model"),
    InputBatch: ("add_request", "remove_request"),
}
