"""The `trace:` section of a simulation's YAML file: a file or a generator, and what is done to its requests.

    trace: {file: azure.csv, window: [600, 1200], upscale: 4}
    trace: {generator: gamma, rate_per_s: 3, cv: 2, duration_s: 600, lengths: {file: sharegpt.csv}}
    trace: {generator: burstgpt, rate_per_s: 8, kv_demand: {mean_tokens: 400000, tpot_s: 0.042}}

Lengths are `{file: ...}`, `{prompt: [low, high], output: [low, high]}` (uniform), or `{prompt_mean, prompt_p99,
output_mean, output_p99}` (lognormal). What is done to the requests is done in the order of the fields of `TraceConfig`.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.generators.base import Generator
from pengserve.simulator.traces.generators.burstgpt import BurstGpt, ExtremeBurst
from pengserve.simulator.traces.generators.conversations import MultiTurn
from pengserve.simulator.traces.generators.flying import Flying, PriorityMix
from pengserve.simulator.traces.generators.lengths import Lengths, LognormalLengths, SampledLengths, UniformLengths
from pengserve.simulator.traces.generators.steady import Gamma, Poisson, Ramp
from pengserve.simulator.traces.kv_demand import StayModel
from pengserve.simulator.traces.loading import load
from pengserve.simulator.traces.transforms import clip, scale_rate, window, with_lengths
from pengserve.simulator.traces.upscale import scale_to_kv, upscale

GENERATORS: Mapping[str, type[Any]] = {
    "poisson": Poisson,
    "gamma": Gamma,
    "burstgpt": BurstGpt,
    "ramp": Ramp,
    "multi_turn": MultiTurn,
    "flying": Flying,
    "priority": PriorityMix,
    "extreme": ExtremeBurst,
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class KvDemandConfig(_Section):
    """The mean demand for KV that a trace is upscaled to, and how long its requests are taken to stay."""

    mean_tokens: float = Field(gt=0)
    prefill_s_per_token: float = Field(default=0.0, ge=0)
    tpot_s: float = Field(gt=0)

    @property
    def stay(self) -> StayModel:
        """As the statistics take it."""
        return StayModel(prefill_s_per_token=self.prefill_s_per_token, tpot_s=self.tpot_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthsFile:
    """Lengths of a file, relative to the folder of the configuration."""

    file: str


class TraceConfig(_Section):
    """What arrives. A generator's own fields stand beside its name; here they are in `settings`."""

    file: str | None = None
    format: str | None = None  # None: what the file's header tells
    step_s: float | None = Field(default=None, gt=0)  # for traces that count arrivals in decode steps
    trace_id: str | None = None  # for files that hold several traces
    generator: str | None = None
    settings: Any = None  # a value of `GENERATORS[generator]`
    lengths: Any = None  # LengthsFile, UniformLengths or LognormalLengths; None: the file's or the generator's own
    window: tuple[float, float] | None = None  # [start_s, stop_s), which becomes [0, stop_s - start_s)
    clip: int | None = Field(default=None, ge=2)  # the model's context length
    rate_scale: float | None = Field(default=None, gt=0)
    upscale: float | None = Field(default=None, gt=0)
    kv_demand: KvDemandConfig | None = None
    max_requests: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _gather_settings(cls, data: Any) -> Any:
        # {generator: gamma, cv: 2, window: ...} -> {generator: gamma, settings: Gamma(cv=2), window: ...}
        if not isinstance(data, Mapping):
            return data
        if "settings" in data:
            raise ValueError("unknown key 'settings': a generator's fields stand beside its name")
        if data.get("generator") is None:
            return data
        name = data["generator"]
        if not isinstance(name, str) or name not in GENERATORS:
            raise ValueError(f"generator must be one of {', '.join(GENERATORS)}, got {name!r}")
        common = {key: value for key, value in data.items() if key in cls.model_fields}
        own = {key: value for key, value in data.items() if key not in cls.model_fields}
        return {**common, "settings": _value(GENERATORS[name], own, beside=_common_keys())}

    @model_validator(mode="after")
    def _one_source(self) -> "TraceConfig":
        if (self.file is None) == (self.generator is None):
            raise ValueError("give either file or generator")
        if self.generator is not None:
            for name in ("format", "step_s", "trace_id"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for files: leave it out beside generator {self.generator!r}")
            if self.lengths is None and self.settings.default_lengths is None:
                raise ValueError(f"generator {self.generator!r} has no lengths of its own: give lengths")
        return self

    @field_validator("lengths", mode="before")
    @classmethod
    def _choose_lengths(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            if data is None or isinstance(data, LengthsFile | UniformLengths | LognormalLengths):
                return data
            raise ValueError("give {file}, {prompt, output} or {prompt_mean, prompt_p99, output_mean, output_p99}")
        kind: type[Any] = LognormalLengths
        if "file" in data:
            kind = LengthsFile
        elif "prompt" in data or "output" in data:
            kind = UniformLengths
        return _value(kind, dict(data))

    @field_validator("window")
    @classmethod
    def _window_has_length(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not 0 <= value[0] < value[1]:
            raise ValueError(f"give [start_s, stop_s] with 0 <= start_s < stop_s, got {list(value)!r}")
        return value

    @model_serializer(mode="wrap")
    def _flat(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # As it would be written, with defaults filled in.
        data: dict[str, Any] = {key: value for key, value in serialize(self).items() if value is not None}
        own: dict[str, Any] = data.pop("settings", {})
        return data | own


def parse(data: Mapping[str, Any], source: str = "") -> TraceConfig:
    """The `trace:` section as a checked value. `source` is the file that it stands in.

    Raises:
        ConfigError: names the file and the field, and what would be accepted.
    """
    try:
        return TraceConfig.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(dict.fromkeys(_explain(problem) for problem in error.errors(include_url=False)))
        raise ConfigError(f"{problems}{f' (in {source})' if source else ''}") from None


def build(config: TraceConfig, seed: int, folder: Path) -> tuple[Arrival, ...]:
    """The trace that `config` describes; relative paths in it start at `folder`.

    Raises:
        ConfigError: names the file, row or field that cannot be used.
    """
    arrivals = _source(config, seed, folder)
    if config.window is not None:
        arrivals = window(arrivals, *config.window)
    if config.clip is not None:
        arrivals = clip(arrivals, config.clip)
    if config.rate_scale is not None:
        arrivals = scale_rate(arrivals, config.rate_scale, seed)
    if config.upscale is not None:
        arrivals = upscale(arrivals, config.upscale, seed)
    if config.kv_demand is not None:
        arrivals = scale_to_kv(arrivals, config.kv_demand.mean_tokens, config.kv_demand.stay, seed)
    return arrivals[: config.max_requests]


def _source(config: TraceConfig, seed: int, folder: Path) -> tuple[Arrival, ...]:
    lengths: Lengths | None = config.lengths
    if isinstance(config.lengths, LengthsFile):
        lengths = SampledLengths.from_file(folder / config.lengths.file)
    if config.file is None:
        generator: Generator = config.settings
        chosen = lengths or generator.default_lengths
        assert chosen is not None, "checked by TraceConfig"
        return generator.generate(chosen, seed)
    arrivals = load(folder / config.file, config.format, config.step_s, config.trace_id)
    return arrivals if lengths is None else with_lengths(arrivals, lengths, seed)


def _value(kind: type[Any], fields: dict[str, Any], beside: Sequence[str] = ()) -> Any:
    # A dataclass from plain data. A wrong field becomes one sentence, which pydantic prefixes with where it stands.
    known = [field.name for field in dataclasses.fields(kind)]
    for key in fields:
        if key not in known:
            raise ValueError(_unknown(key, [*known, *beside]))
    try:
        return TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        raise ValueError("; ".join(_explain(problem) for problem in error.errors(include_url=False))) from None
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _explain(error: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return _unknown(key, _common_keys())
    if error["type"] in ("missing", "missing_keyword_only_argument"):
        return f"{key} is missing: give it"
    if error["type"] == "value_error":
        return f"{key}: {message}" if key else message
    if not key:
        return f"a trace must hold keys and values, such as `file: trace.csv`, got {error['input']!r}"
    return f"{key}: {message[:1].lower()}{message[1:]}, got {error['input']!r}"


def _unknown(key: str, known: Sequence[str]) -> str:
    guesses = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {guesses[0]}?" if guesses else f"known: {', '.join(known)}"
    return f"unknown key {key!r}; {hint}"


def _common_keys() -> list[str]:
    return [name for name in TraceConfig.model_fields if name != "settings"]
