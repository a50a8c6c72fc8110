"""The one table of vLLM names that the ingress uses. An upgrade that moves one fails its test with a sentence.

vLLM is pinned to 0.32. `ATTRIBUTES` lists members that are read or called on objects of these classes, and
`PARAMETERS` the keyword arguments that are passed by name, so that a rename inside a class is seen as well.
"""

from types import ModuleType

import vllm.entrypoints.openai.chat_completion.serving as chat_serving
import vllm.entrypoints.openai.completion.serving as completion_serving
import vllm.entrypoints.openai.responses.serving as responses_serving
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.api_router import router as completion_router
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.api_router import router as models_router
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.api_router import router as responses_router
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.entrypoints.serve.tokenize.api_router import router as tokenize_router
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.envs import enable_envs_cache
from vllm.exceptions import (
    GenerationError,
    GracefulHTTPError,
    RetryableRequestError,
    VLLMClientError,
    VLLMError,
    VLLMValidationError,
)
from vllm.outputs import STREAM_FINISHED, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind, check_json_nesting
from vllm.usage.usage_lib import UsageContext
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from vllm.v1.structured_output import backend_xgrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, has_xgrammar_unsupported_json_features
from vllm.v1.structured_output.request import get_structured_output_key
from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark
from vllm.version import __version__ as vllm_version

__all__ = [
    "ATTRIBUTES",
    "PARAMETERS",
    "STREAM_FINISHED",
    "USAGE_MAKERS",
    "AsyncEngineArgs",
    "BaseModelPath",
    "EngineClient",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineGenerateError",
    "ErrorInfo",
    "ErrorResponse",
    "FinishReason",
    "GenerationError",
    "GracefulHTTPError",
    "InputProcessor",
    "IterationStats",
    "OnlineRenderer",
    "OpenAIServingChat",
    "OpenAIServingCompletion",
    "OpenAIServingModels",
    "OpenAIServingResponses",
    "OutputProcessor",
    "ParentRequest",
    "PrometheusStatLogger",
    "RequestOutput",
    "RequestOutputCollector",
    "RequestOutputKind",
    "RequestState",
    "RetryableRequestError",
    "SchedulerStats",
    "ServingTokenization",
    "StatLoggerManager",
    "StructuredOutputOptions",
    "UsageContext",
    "VLLMClientError",
    "VLLMError",
    "VLLMValidationError",
    "VllmConfig",
    "XgrammarBackend",
    "backend_xgrammar",
    "chat_router",
    "check_json_nesting",
    "choice_as_grammar",
    "clean_loc_for_param",
    "completion_router",
    "enable_envs_cache",
    "extract_prompt_components",
    "freeze_gc_heap",
    "get_structured_output_key",
    "grammar_is_likely_lark",
    "has_xgrammar_unsupported_json_features",
    "load_chat_template",
    "models_router",
    "ray_stat_logger",
    "renderer_from_config",
    "responses_router",
    "tokenize_router",
    "vllm_version",
    "with_cancellation",
]


def ray_stat_logger() -> type[PrometheusStatLogger]:
    """vLLM's metrics through `ray.util.metrics`. Imports Ray, so only where Ray is the backend."""
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    return RayPrometheusStatLogger


ATTRIBUTES: dict[type, tuple[str, ...]] = {
    AsyncEngineArgs: ("create_engine_config",),
    EngineClient: ("generate", "encode", "abort", "check_admission", "get_supported_tasks"),
    InputProcessor: ("process_inputs", "assign_request_id", "get_tokenizer"),
    OutputProcessor: (
        "add_request",
        "process_outputs",
        "abort_requests",
        "has_request",
        "get_num_unfinished_requests",
        "update_scheduler_stats",
    ),
    RequestOutputCollector: ("put", "get", "get_nowait", "close"),
    RequestOutput: ("add",),
    ParentRequest: ("get_child_info",),
    StatLoggerManager: ("record", "log_engine_initialized"),
    OpenAIServingModels: ("init_static_loras", "is_base_model", "show_available_models"),
    OpenAIServingChat: ("create_error_response", "create_streaming_error_response", "_extract_prompt_len"),
    OpenAIServingCompletion: ("create_error_response", "create_streaming_error_response", "_extract_prompt_len"),
    OpenAIServingResponses: ("create_error_response", "create_streaming_error_response", "_extract_prompt_len"),
    OnlineRenderer: ("warmup", "create_error_response"),
    VLLMClientError: (),
    GracefulHTTPError: (),
    StructuredOutputOptions: ("JSON", "REGEX", "GRAMMAR", "STRUCTURAL_TAG"),
    XgrammarBackend: ("compile_grammar", "destroy"),
}

# Where serving modules look up what makes the `usage` of an answer.
USAGE_MAKERS: tuple[tuple[ModuleType, str], ...] = (
    (chat_serving, "UsageInfo"),
    (completion_serving, "UsageInfo"),
    (responses_serving, "ResponseUsage"),
)

PARAMETERS: dict[object, tuple[str, ...]] = {
    InputProcessor.process_inputs: (
        "supported_tasks",
        "lora_request",
        "tokenization_kwargs",
        "trace_headers",
        "priority",
        "data_parallel_rank",
        "session_id",
        "kv_hints",
    ),
    XgrammarBackend.__init__: ("tokenizer", "vocab_size"),
    OutputProcessor.__init__: ("log_stats", "stream_interval"),
    OutputProcessor.process_outputs: ("weight_version",),
    OnlineRenderer.__init__: (
        "trust_request_chat_template",
        "trust_request_mm_kwargs",
        "tool_parser",
        "reasoning_parser",
        "enable_auto_tools",
    ),
    OpenAIServingChat.__init__: ("online_renderer", "tool_parser", "reasoning_parser", "enable_auto_tools"),
    OpenAIServingCompletion.__init__: ("online_renderer", "request_logger"),
    OpenAIServingResponses.__init__: ("tool_server", "tool_parser", "reasoning_parser", "enable_auto_tools"),
    StatLoggerManager.__init__: ("engine_idxs", "custom_stat_loggers", "enable_default_loggers"),
}
