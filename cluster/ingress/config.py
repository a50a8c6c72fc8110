"""What one ingress needs to run, as frozen values. `cluster/app.py` makes it from the settings."""

from dataclasses import dataclass, field

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.contract import ServiceClass
from pengserve.planners.types.tenants import FairnessConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitConfig:
    """What one request, and all of them together, may ask for."""

    max_body_bytes: int = 4 << 20
    max_n: int = 16
    max_stop_strings: int = 16
    compile_cpu_s: float = 2.0  # processor time that the schema or pattern of a request may take to compile
    allow_grammars: bool = False  # EBNF and Lark, which can cost an instance much time for each token
    max_queued_requests: int = 512  # sequences that may wait beyond what the instances run at once
    request_timeout_s: float = 0.0  # 0: no limit
    no_instance_timeout_s: float = 300.0  # a request waits so long for an instance to become ready
    parallelism_wait_s: float = 2.0  # ... and so long for a group of the parallelism it wishes; then any will do
    max_prefix_entries: int = (
        1 << 18
    )  # granules of 64 tokens that an ingress remembers, to find cached prefixes; 0: none
    max_losses: int = 32  # instances that may die under one request before it is given up
    max_losses_in_place: int = 8  # the same, in a row without one new token
    max_deaths_alone: int = 2  # instances that may die of one request and, for all we know, of nothing else
    verdict_wait_s: float = 2.0  # before it is given up then: further deaths may show another cause


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIConfig:
    """How vLLM's OpenAI layer reads and writes messages."""

    chat_template: str | None = None  # a file or the template itself
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    reasoning_parser: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressConfig:
    """One ingress of an application."""

    instance: InstanceConfig  # the engine arguments: both sides must read the model in the same way
    num_instances: int
    num_ingresses: int = 1
    served_model_names: tuple[str, ...] = ()  # empty: the model's own name
    host: str = "127.0.0.1"  # where HTTP is bound
    allowed_origins: tuple[str, ...] = ()  # of web pages that browsers let in (CORS); "*": of all
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str = field(default="", repr=False)
    metrics_key: str = field(default="", repr=False)
    api_keys_file: str = ""  # one key a line, on the ingress's machine; read again when it changes
    admin_key_file: str = ""
    metrics_key_file: str = ""
    is_tenant_trusted: bool = False  # the header `x-pengserve-tenant` comes from a proxy that sets it itself
    classes: tuple[ServiceClass, ...] = ()  # beside the built-in ones, or in their place
    fairness: FairnessConfig = field(default_factory=FairnessConfig)
    limits: LimitConfig = field(default_factory=LimitConfig)
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)
    metrics_backend: str = "auto"
    request_log: str = ""  # JSONL file; empty: none
    log_max_bytes: int = 64 << 20  # of each of its files; 0: no limit
    log_num_older: int = 4  # files that are kept besides the newest
    otlp_endpoint: str = ""  # where spans of requests go; empty: none are made
    trace_sample_ratio: float = 1.0  # of requests whose client has not decided
    is_id_echoed: bool = False  # a server in front (Ray Serve) puts the request's x-request-id on the answer itself

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that groups of this cluster may have."""
        return tuple(degree for degree in self.instance.degrees if degree <= self.num_instances)

    @property
    def has_api_keys(self) -> bool:
        """Whether the API asks for a key."""
        return bool(self.api_keys or self.api_keys_file)

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can connect."""
        return self.host in ("127.0.0.1", "localhost", "::1")
