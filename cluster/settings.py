"""The user's configuration: what can be set, with its defaults and what is refused. `settings_sources.py` reads it.

`Settings` is a plain pydantic model: `Settings.model_validate(data)` takes the data as it is.

Standard library and pydantic only: the command line imports this for `--help`.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pengserve.cluster.class_settings import ClassSettings, service_classes
from pengserve.cluster.demo.shipped import SHIPPED_NAME, shipped_model
from pengserve.cluster.devices import has_cuda_driver
from pengserve.cluster.fairness_settings import FairnessSettings
from pengserve.cluster.http_settings import HttpSettings
from pengserve.cluster.instance_settings import (
    CHUNK_BYTES,
    CPU_ENGINE_DEFAULTS,
    CPU_INSTANCES,
    CUDA_ENGINE_DEFAULTS,
    InstanceSettings,
)
from pengserve.cluster.memory_settings import AUTO_BYTES, MemorySettings
from pengserve.cluster.security_settings import SecuritySettings
from pengserve.cluster.shape_settings import COMMUNICATORS, ShapeSettings
from pengserve.planners.types.config import ControllerConfig, InstanceConfig, MigrateConfig
from pengserve.planners.types.units import MIB


def _size(engine: Mapping[str, Any], name: str) -> int:
    return int(engine.get(name, 1))


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True)


class LimitSettings(_Section):
    """What one request, and all of them together, may ask for."""

    max_body_bytes: int = Field(default=4 * MIB, ge=1024)
    max_n: int = Field(default=16, ge=1)
    max_stop_strings: int = Field(default=16, ge=0)
    compile_cpu_s: float = Field(default=2, gt=0)  # processor time to compile the schema or pattern of a request
    allow_grammars: bool = False  # EBNF and Lark in requests, which can cost an instance much time for each token
    max_queued_requests: int = Field(default=512, ge=1)
    parallelism_wait_s: float = Field(default=2, ge=0)  # for a group that a request wishes for; then any will do
    # Granules of 64 tokens that an ingress remembers, to send requests where their prefix is cached; 0: none.
    max_prefix_entries: int = Field(default=1 << 18, ge=0, le=1 << 24)
    request_timeout_s: float = Field(default=0, ge=0)  # 0: no limit


class OpenAISettings(_Section):
    """How vLLM's OpenAI layer reads and writes messages."""

    chat_template: str | None = None
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    reasoning_parser: str | None = None


class ControllerSettings(_Section):
    """The control loop's periods and patience; see `planners.types.config.ControllerConfig`."""

    tick_s: float = Field(default=0.5, gt=0)
    status_timeout_s: float = Field(default=3, gt=0)
    lost_after_s: float = Field(default=10, gt=0)
    start_timeout_s: float = Field(default=600, gt=0)
    restart_backoff_s: float = Field(default=1, gt=0)
    restart_backoff_max_s: float = Field(default=60, gt=0)
    drain_timeout_s: float = Field(default=60, ge=0)
    prepare_timeout_s: float = Field(default=3, gt=0)  # of a switch: until all members have said that they can
    commit_timeout_s: float = Field(default=20, gt=0)  # ... and until it is done, beyond its drain
    # Instances that load at the same time; 0: all, but on CPUs one fewer than there are cores.
    max_starting: int = Field(default=0, ge=0)


class MetricsSettings(_Section):
    """Who collects metrics: Prometheus scrapes the ingress, or Ray's agent exports them."""

    backend: Literal["auto", "prometheus", "ray"] = "auto"


class TraceSettings(_Section):
    """Spans of requests, over OTLP and HTTP. Needs `pip install 'pengserve[traces]'`."""

    otlp_endpoint: str = Field(default="", pattern=r"^(https?://\S+)?$")  # "http://127.0.0.1:4318/v1/traces"; "": off
    sample_ratio: float = Field(default=1.0, ge=0, le=1)  # of requests whose client has not decided


class Settings(_Section):
    """Everything the user decides about one application. Unknown keys are refused."""

    app: str = Field(default="pengserve", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    model: str = Field(min_length=1)
    served_model_name: list[str] = []  # empty: the last part of `model`
    instances: InstanceSettings = InstanceSettings()
    engine: dict[str, Any] = {}  # vLLM engine arguments by their Python names, passed through
    http: HttpSettings = HttpSettings()
    security: SecuritySettings = SecuritySettings()
    limits: LimitSettings = LimitSettings()
    classes: dict[str, ClassSettings] = {}  # what requests of a service class may ask for; see `class_settings`
    fairness: FairnessSettings = FairnessSettings()
    openai: OpenAISettings = OpenAISettings()
    controller: ControllerSettings = ControllerSettings()
    shape: ShapeSettings = ShapeSettings()
    memory: MemorySettings = MemorySettings()
    metrics: MetricsSettings = MetricsSettings()
    traces: TraceSettings = TraceSettings()
    event_log: str = ""  # JSONL file; empty keeps events in memory alone
    request_log: str = ""  # JSONL file: a line for each answer, without its text; empty: none
    # Of each log: the newest file is renamed when it would grow beyond so many bytes (0: never), ...
    log_max_bytes: int = Field(default=64 * MIB, ge=0)
    log_num_older: int = Field(default=4, ge=0)  # ... and so many renamed ones are kept

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _one_name_is_a_list(cls, value: Any) -> Any:
        return _as_list(value)

    @field_validator("engine")
    @classmethod
    def _python_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        engine = {key.replace("-", "_"): item for key, item in value.items()}
        for key, instead in {"model": "model", "served_model_name": "served_model_name"}.items():
            if key in engine:
                raise ValueError(f"{key} is set by the top-level key {instead!r}, not under engine")
        for key in ("tensor_parallel_size", "pipeline_parallel_size"):
            if type(engine.get(key, 1)) is not int or engine.get(key, 1) < 1:
                raise ValueError(f"{key} must be a whole number from 1 on; got {engine[key]!r}")
        return engine

    @field_validator("classes")
    @classmethod
    def _classes_can_be(cls, value: dict[str, ClassSettings]) -> dict[str, ClassSettings]:
        service_classes(value)
        return value

    @model_validator(mode="before")
    @classmethod
    def _fill_from_model(cls, data: Any) -> Any:
        # A local directory becomes absolute here, in the user's current directory: instances run elsewhere.
        if not isinstance(data, Mapping) or not isinstance(data.get("model"), str) or not data["model"]:
            return data
        directory = Path(data["model"]).expanduser()
        model = str(directory.resolve()) if directory.is_dir() else data["model"]
        names = data.get("served_model_name") or [Path(model).name]
        if model == SHIPPED_NAME:
            model = str(shipped_model())
        return {**data, "model": model, "served_model_name": names}

    @model_validator(mode="after")
    def _open_only_on_loopback(self) -> "Settings":
        if not self.http.is_loopback and not self.security.has_api_keys:
            raise ValueError(
                f"http.host {self.http.host!r} can be reached from other machines, so security.api_keys must hold at"
                " least one key; or use 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _fair_order_is_kept(self) -> "Settings":
        policy = self.engine.get("scheduling_policy", "priority")
        if self.fairness.enabled and policy != "priority":
            raise ValueError(
                "fairness.enabled orders requests by vLLM's policy `priority`, and engine.scheduling_policy is"
                f" {policy}: leave out one of the two"
            )
        return self

    @model_validator(mode="after")
    def _memory_has_chunks(self) -> "Settings":
        memory_bytes = self.instances.memory_bytes
        if memory_bytes != "auto" and 0 < memory_bytes < self.chunk_bytes:
            raise ValueError(
                f"instances.memory_bytes ({memory_bytes}) must hold at least one of chunk_bytes ({self.chunk_bytes}),"
                " or be 0 to leave memory to the engine, or auto"
            )
        return self

    @model_validator(mode="after")
    def _shape_may_change(self) -> "Settings":
        asked = self._asked_of_the_shape()
        if asked and self.num_workers > 1:
            raise ValueError(
                f"{self.parallel_setting} gives an engine {self.num_workers} processes, and"
                f" {asked} lets instances change their shape, which needs engines of one process: leave out one of"
                " the two"
            )
        if self.device == "cuda" and self.shape.cuda == "off":
            budget = self.instances.memory_bytes
            asked = asked or (f"instances.memory_bytes of {budget}" if budget else "")
            if asked:
                raise ValueError(
                    f"{asked} needs `shape.cuda: experimental` on CUDA, where it has run on one GPU and not between"
                    " GPUs: set it, or leave the first out"
                )
        return self

    def _asked_of_the_shape(self) -> str:
        """What was set to have instances change their shape, beyond the defaults; empty where nothing was."""
        if self.shape.drop.max_stages > 1:
            return f"shape.drop.max_stages of {self.shape.drop.max_stages}"
        if self.shape.degrees != "auto" and self.shape.degrees:
            return f"shape.degrees of {self.shape.degrees}"
        return ""

    @model_validator(mode="after")
    def _gpus_are_those_of_the_engine(self) -> "Settings":
        gpus, workers = self.instances.gpus, self.num_workers
        if self.device == "cuda" and gpus is not None and (gpus > workers or (workers > 1 and gpus != workers)):
            raise ValueError(
                f"instances.gpus is {gpus:g}, and {self.parallel_setting} makes the engine use {workers}: leave"
                " instances.gpus out, or give the same number"
            )
        return self

    @model_validator(mode="after")
    def _degrees_fit(self) -> "Settings":
        degrees = self.shape.degrees
        if degrees != "auto" and degrees and self.is_counted and degrees[-1] > self.num_instances:
            raise ValueError(
                f"shape.degrees: a group of {degrees[-1]} needs as many instances, and instances.count is"
                f" {self.num_instances}"
            )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> "Settings":
        stages = self.shape.drop.max_stages
        if self.is_counted and stages > self.num_instances:
            raise ValueError(
                f"shape.drop.max_stages: a pipeline of {stages} needs as many instances, and instances.count is"
                f" {self.num_instances}"
            )
        if self.instances.memory_bytes and "kv_cache_memory_bytes" in self.engine:
            raise ValueError(
                "engine.kv_cache_memory_bytes: leave it out, as instances.memory_bytes says what weights and KV have"
                " together"
            )
        if stages > 1 and not self.instances.memory_bytes:
            raise ValueError(
                f"shape.drop.max_stages of {stages} needs instances.memory_bytes: the bytes that weights and KV of an"
                " instance share, so that memory can go from the one to the other; auto takes what is free"
            )
        return self

    @property
    def chunk_bytes(self) -> int:
        """Unit in which memory moves between weights and KV: the given one, or that of the device."""
        return self.instances.chunk_bytes or CHUNK_BYTES[self.device]

    @property
    def is_counted(self) -> bool:
        """Whether the number of instances is known; where it is not, `placement.settle` asks for the devices."""
        return self.instances.count != "auto" or self.device == "cpu"

    @property
    def num_instances(self) -> int:
        """How many instances there are. Only where `is_counted`."""
        assert self.is_counted, "ask placement.settle for the number of instances first"
        return CPU_INSTANCES if self.instances.count == "auto" else self.instances.count

    @property
    def num_workers(self) -> int:
        """Processes, and on CUDA devices, that the engine of one instance works with."""
        return _size(self.engine, "tensor_parallel_size") * _size(self.engine, "pipeline_parallel_size")

    @property
    def parallel_setting(self) -> str:
        """The setting that says how many processes an engine has."""
        wide = _size(self.engine, "pipeline_parallel_size") > 1 >= _size(self.engine, "tensor_parallel_size")
        return f"engine.{'pipeline' if wide else 'tensor'}_parallel_size"

    @property
    def may_change_shape(self) -> bool:
        """Whether this device and this engine let instances work together at all."""
        return self.num_workers == 1 and (self.device == "cpu" or self.shape.cuda == "experimental")

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that groups may have; empty where the shape never changes."""
        if not self.may_change_shape:
            return ()
        if self.shape.degrees != "auto":
            return tuple(self.shape.degrees)
        widest = min(self.num_instances, self.shape.max_degree)
        return tuple(1 << power for power in range(1, widest.bit_length()))

    @property
    def max_stages(self) -> int:
        """Stages that a pipeline of instances may have; 1 where parameters are never dropped."""
        return self.shape.drop.max_stages if self.may_change_shape else 1

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The device in use: `auto` is cuda where this machine has a CUDA driver, else cpu."""
        if self.instances.device == "auto":
            return "cuda" if has_cuda_driver() else "cpu"
        return self.instances.device

    @property
    def gpus_per_instance(self) -> float:
        """GPUs that Ray reserves for an instance."""
        if self.instances.gpus is not None:
            return self.instances.gpus
        return float(self.num_workers) if self.device == "cuda" else 0.0

    def engine_args(self) -> dict[str, Any]:
        """The vLLM engine arguments of an instance: the device's defaults under the user's."""
        defaults = dict(CPU_ENGINE_DEFAULTS if self.device == "cpu" else CUDA_ENGINE_DEFAULTS)
        if self.instances.memory_bytes:
            defaults.pop("kv_cache_memory_bytes", None)
        if self.fairness.enabled:
            defaults["scheduling_policy"] = "priority"
        return {**defaults, **self.engine}

    def instance_config(self, channel_token: str) -> InstanceConfig:
        """What an instance is started with. `channel_token` is the request channel's shared secret."""
        return InstanceConfig(
            app=self.app,
            model=self.model,
            device=self.device,
            cpu_threads=self.instances.cpu_threads,
            engine=self.engine_args(),
            channel_token=channel_token,
            channel_host=self.instances.channel_host,
            lease_s=self.instances.lease_s,
            degrees=self.degrees,
            max_stages=self.max_stages,
            microbatches=self.shape.drop.microbatches,
            max_in_flight=self.shape.drop.max_in_flight,
            memory_bytes=AUTO_BYTES if self.instances.memory_bytes == "auto" else self.instances.memory_bytes,
            chunk_bytes=self.chunk_bytes,
            host_bytes=self.memory.num_bytes,
            link_bytes_per_s=self.memory.link_bytes_per_s or 0.0,
            host_file=self.memory.host_file,
            places_by_slo=self.memory.place_by_slo,
            session_pin_s=self.memory.session_pin_s,
            peer_timeout_s=self.shape.peer_timeout_s,
            communicator=COMMUNICATORS[self.shape.communicator],
            drain_timeout_s=self.controller.drain_timeout_s,
        )

    def controller_config(self) -> ControllerConfig:
        """What the controller is started with."""
        return ControllerConfig(
            app=self.app,
            num_instances=self.num_instances,
            cpus_per_instance=self.instances.cpus,
            gpus_per_instance=self.gpus_per_instance,
            event_log_path=self.event_log,
            event_log_max_bytes=self.log_max_bytes,
            event_log_num_older=self.log_num_older,
            degrees=self.degrees,
            merge=self.shape.merge_config(),
            drop=replace(self.shape.drop.drop_config(), max_stages=self.max_stages),
            migrate=MigrateConfig(is_auto=self.shape.migrate, redirects=self.shape.redirect),
            judge=self.shape.judge.judge_config(),
            classes=service_classes(self.classes),
            **(self.controller.model_dump() | {"max_starting": self._max_starting}),
        )

    @property
    def _max_starting(self) -> int:
        # The ingress imports vLLM at the same time, and the first instance should not share its core with the second.
        if self.controller.max_starting or self.device != "cpu":
            return self.controller.max_starting
        return max(1, (os.cpu_count() or 2) - 1)

    def to_args(self) -> dict[str, Any]:
        """The settings as JSON data WITH the secrets in the clear, for the Serve builder alone; never log it.

        `Settings.model_validate(settings.to_args())` equals `settings`.
        """
        data = self.model_dump(mode="json")
        data["security"] = self.security.to_args()
        return data
