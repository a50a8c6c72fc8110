"""What to simulate, as a YAML file says it.

name: azure-8xa800
cluster: {gpu: a800, model: qwen2.5-14b, instances: 8, max_stages: 2}
policy: {name: pengserve}
trace: {file: azure.csv, window: [600, 1200]}
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pengserve.planners.types.config import check_degrees, check_max_stages
from pengserve.planners.types.errors import ConfigError
from pengserve.planners.types.units import GIB
from pengserve.simulator.traces.config import TraceConfig


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class ClusterConfig(_Section):
    """The machines, the model, and what shapes they may take."""

    gpu: str | None = None  # of the catalog
    model: str | None = None  # of the catalog
    profile: str | None = None  # of the catalog, in place of both: what `pengserve profile` measured
    catalog: tuple[str, ...] = ()  # files of the user's own rows, relative to this file
    instances: int = Field(default=2, ge=1, le=4096)
    gpus_per_instance: int = Field(default=1, ge=1)  # that always work together, tensor-parallel
    gpus_per_node: int = Field(default=8, ge=1)
    degrees: tuple[int, ...] = ()  # of tensor-parallel groups of instances; none: nothing merges
    max_stages: int = Field(default=1, ge=1)  # of pipelines of instances; 1: no parameters are dropped
    memory_utilization: float = Field(default=0.9, gt=0, le=1)  # share of a GPU's memory, as vLLM's option
    reserved_bytes: int = Field(default=2 * GIB, ge=0)  # of that, on each GPU: activations and CUDA graphs
    kv_tokens: int | None = Field(default=None, ge=1)  # that an instance alone has room for; None: as memory allows
    host_bytes: int = Field(default=0, ge=0)  # of an instance's host, for KV; 0: none
    block_size: int = Field(default=16, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    max_model_len: int | None = Field(default=None, ge=2)  # None: the model's own, as far as memory holds it
    scheduling: Literal["fcfs", "priority"] = "fcfs"
    prefix_caching: bool = False  # vLLM's scheduler alone finds prefixes
    async_scheduling: bool = False  # the host's part of a step runs under the device's, as vLLM's option
    links: dict[str, float] = {}  # bytes per second in place of the GPU's own: nvlink, nic, pcie
    ingresses: int = Field(default=1, ge=1)  # that share the requests; each knows of prefixes what it sent itself
    request_s: float = Field(default=0.0, ge=0)  # before an instance has a request: HTTP, chat template, tokenizer
    processors: float = Field(default=1.0, gt=0, le=1)  # of an instance; below 1 steps were timed while all were busy
    start_s: float | None = Field(default=None, ge=0)  # of an instance that replaces a dead one; None: as costs.yaml

    @model_validator(mode="after")
    def _one_machine(self) -> "ClusterConfig":
        if (self.profile is None) == (self.gpu is None or self.model is None):
            raise ValueError("give either gpu and model, or profile")
        if self.profile is not None and self.model is not None:
            raise ValueError("a profile is of a model: leave model out")
        if self.profile is not None and self.async_scheduling:
            raise ValueError("a profile has the host's part in it as it was measured: leave async_scheduling out")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs"
                f" ({self.max_num_seqs}), as in vLLM"
            )
        if self.gpus_per_node % self.gpus_per_instance:
            raise ValueError(
                f"gpus_per_instance ({self.gpus_per_instance}) must divide gpus_per_node ({self.gpus_per_node})"
            )
        return self

    @field_validator("degrees")
    @classmethod
    def _powers_of_two(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return check_degrees(value)

    @field_validator("max_stages")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        return check_max_stages(value)

    @field_validator("links")
    @classmethod
    def _known_links(cls, value: dict[str, float]) -> dict[str, float]:
        for name, speed in value.items():
            if name not in ("nvlink", "nic", "pcie") or speed <= 0:
                raise ValueError(f"give bytes per second, above 0, for nvlink, nic or pcie; got {name}: {speed}")
        return value

    @property
    def per_node(self) -> int:
        """Instances of one node."""
        return self.gpus_per_node // self.gpus_per_instance


class PolicyConfig(_Section):
    """Who decides about the layout; `options` are the fields of that policy."""

    name: str = "pengserve"
    options: dict[str, Any] = {}


class SloConfig(_Section):
    """What counts as served in time."""

    ttft_s: float | None = Field(default=None, gt=0)
    tpot_s: float | None = Field(default=None, gt=0)
    tbt_s: float | None = Field(default=None, gt=0)  # between two tokens of each request


class ControllerOptions(_Section):
    """Of the production controller."""

    tick_s: float = Field(default=0.5, gt=0)
    restart_backoff_s: float = Field(default=1.0, gt=0)


class LimitOptions(_Section):
    """Of the production ingress; see `ingress.IngressLimits`."""

    no_instance_timeout_s: float = Field(default=300.0, gt=0)
    parallelism_wait_s: float = Field(default=2.0, ge=0)
    max_queued_requests: int | None = Field(default=None, ge=0)  # None: nothing is refused for load


class SwitchOptions(_Section):
    """What a change of shape costs beside what it sends, in place of `hardware/costs.yaml`."""

    cutover_s: float | None = Field(default=None, ge=0)  # nothing steps for so long
    call_s: float | None = Field(default=None, ge=0)  # one map or unmap of memory
    start_bytes_per_s: float | None = Field(default=None, gt=0)  # weights from the node's disk


class Death(_Section):
    """An instance that dies, `at_s` after the traffic began."""

    instance: int = Field(ge=0)
    at_s: float = Field(ge=0)


class LayoutChange(_Section):
    """A user asks for a layout, `at_s` after the traffic began: "tp2@(0,1)", "pp2", "dp", or "auto"."""

    at_s: float = Field(ge=0)
    layout: str
    strategy: Literal["sequential", "soft", "hard", "carry"] = "carry"


class SimulationConfig(_Section):
    """One simulation."""

    name: str = "simulation"
    seed: int = 0
    cluster: ClusterConfig
    scheduler: Literal["auto", "vllm", "fast"] = "auto"  # auto: vLLM's own up to 64 instances
    policy: PolicyConfig = PolicyConfig()
    trace: TraceConfig | None = None  # None: requests are given in code
    slo: SloConfig = SloConfig()
    sample_s: float = Field(default=1.0, gt=0)
    horizon_s: float | None = Field(default=None, gt=0)  # the end, also where requests still run
    controller: ControllerOptions = ControllerOptions()
    limits: LimitOptions = LimitOptions()
    switches: SwitchOptions = SwitchOptions()
    deaths: tuple[Death, ...] = ()
    layouts: tuple[LayoutChange, ...] = ()
    folder: Path = Field(default=Path(), exclude=True)  # where relative paths begin

    @model_validator(mode="after")
    def _places(self) -> "SimulationConfig":
        for death in self.deaths:
            if death.instance >= self.cluster.instances:
                raise ValueError(
                    f"deaths name instance {death.instance}, and the instances are 0 to {self.cluster.instances - 1}"
                )
        return self

    @classmethod
    def load(cls, path: Path | str) -> "SimulationConfig":
        """Reads a YAML file.

        Raises:
            ConfigError: it cannot be read, or a field is wrong; names the file and the field.
        """
        path = Path(path)
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            mark = getattr(error, "problem_mark", None)
            where = f" in line {mark.line + 1}" if mark is not None else ""
            raise ConfigError(f"{path} is not YAML{where}: {getattr(error, 'problem', None) or error}") from None
        if not isinstance(data, Mapping):
            raise ConfigError(f"{path} must be a mapping with the keys cluster, policy and trace")
        return cls.parse({**data, "folder": path.parent}, source=str(path))

    @classmethod
    def parse(cls, data: Mapping[str, Any], source: str = "") -> "SimulationConfig":
        """From plain data; `source` is the file that it stands in.

        Raises:
            ConfigError: a field is wrong; names it, and what would be accepted.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(explain(error, cls) + (f" (in {source})" if source else "")) from None


def explain(error: ValidationError, kind: type[BaseModel]) -> str:
    """The first problem as one sentence that names the field; `kind` is what was to be read."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    match first["type"]:
        case "extra_forbidden":
            known = _fields(kind, first["loc"][:-1])
            near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
            return (
                f"{key} is no known field: {f'did you mean {near[0]}?' if near else 'choose among ' + ', '.join(known)}"
            )
        case "missing":
            return f"{key} is missing: give it"
        case "value_error":
            return f"{key}: {message}" if key else message
        case _:
            return f"{key}: {message[:1].lower()}{message[1:]}, got {first['input']!r}"


def _fields(kind: type[BaseModel], where: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the section at `where`."""
    for part in where:
        annotation = kind.model_fields[part].annotation if isinstance(part, str) and part in kind.model_fields else None
        for found in (annotation, *get_args(annotation)):
            if isinstance(found, type) and issubclass(found, BaseModel):
                kind = found
    return [name for name in kind.model_fields if name != "folder"]
