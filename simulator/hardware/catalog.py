"""What simulations know of GPUs, models and machines: rows of YAML, those of this package and the user's own.

gpus:                                        models:                              profiles:
  my-gpu:                                      my-model:                            laptop: ...
    memory_bytes: 25_769_803_776                 layers: 32                         (`pengserve profile` writes these)
    hbm_bytes_per_s: 1.0e12                      hidden: 4096
    flops: 1.65e14                               heads: 32
    pcie_bytes_per_s: 3.2e10                     kv_heads: 8
    nic_bytes_per_s: 1.25e10                     head_dim: 128
    source: "data sheet"                         params: 8_030_000_000
                                                 max_model_len: 8192
                                                 source: "its config.json"
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import yaml
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from pengserve.planners.cost_model import CostModel
from pengserve.planners.types.errors import ConfigError

BUILT_IN = ("gpus.yaml", "models.yaml", "profiles.yaml")
SUFFIX = re.compile(r"([-_](instruct|chat|hf|it))+$")  # of Hugging Face names: how it was tuned changes no step

Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1.5)]  # above 1 where clocks are above the sheet's
AtLeastZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_CONFIG = ConfigDict(extra="forbid")


def _costs(costs: CostModel) -> CostModel:
    if not all(isfinite(value) and value >= 0 for value in astuple(costs)) or costs.load_s <= 0:
        raise ValueError("no coefficient is below 0, and load_s is above it")
    if costs.tile_tokens < 1:
        raise ValueError("a tile has one token or more")
    return costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device. Bytes per second are of one direction."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    name: str
    memory_bytes: Count
    hbm_bytes_per_s: Positive
    flops: Positive  # bf16, without sparsity
    pcie_bytes_per_s: Positive  # to the host
    nic_bytes_per_s: Positive  # to other nodes
    nvlink_bytes_per_s: AtLeastZero = 0.0  # to other GPUs of the node; 0: over PCIe
    reached_hbm: Share | None = None  # of `hbm_bytes_per_s` by reads, where it is known; None: as where timed
    reached_flops: Share | None = None  # of `flops` by large matrix products, the same
    timed_as: str | None = None  # GPU of coefficients.csv whose steps are taken; None: the most alike
    aliases: tuple[str, ...] = ()
    source: str

    @property
    def peer_bytes_per_s(self) -> float:
        """To another GPU of the same node."""
        return self.nvlink_bytes_per_s or self.pcie_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model, in one precision."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    name: str
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    params: Count
    max_model_len: Count  # tokens
    embedding_params: Annotated[int, Field(ge=0)] = 0  # of embeddings and LM head, which no pipeline drops
    ties_embeddings: bool = False  # the LM head is the input embedding's matrix
    bytes_per_param: Positive = 2.0  # mean over all weights
    bytes_per_kv_value: Positive = 2.0
    experts: Annotated[int, Field(ge=0)] = 0  # of a mixture; 0: dense
    timed_as: str | None = None  # model of coefficients.csv whose steps are taken; None: the most alike
    aliases: tuple[str, ...] = ()
    source: str

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return round(self.params * self.bytes_per_param)

    @property
    def layer_bytes(self) -> int:
        """Weights of one layer. Embeddings stay in 16 bits where layers are quantised."""
        embedding_bytes = self.embedding_params * max(2.0, self.bytes_per_param)
        return round((self.weight_bytes - embedding_bytes) / self.layers)

    @property
    def layer_params(self) -> int:
        """Those that every token is multiplied by: no embeddings are, and the LM head only where a token is sampled."""
        return self.params - self.embedding_params

    @property
    def read_bytes(self) -> float:
        """What a step reads of the weights: all, but of an input embedding of its own only a row a token."""
        looked_up = 0 if self.ties_embeddings else self.embedding_params / 2
        return self.weight_bytes - looked_up * max(2.0, self.bytes_per_param)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token, over all layers and heads."""
        return round(2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_kv_value)

    @property
    def activation_bytes_per_token(self) -> int:
        """What one stage of a pipeline sends to the next for one token."""
        return 2 * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One model on one machine, as `pengserve profile` measured it; stands in place of a GPU and a model."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    name: str
    gpu: str  # whose memory and links these are
    model: ModelSpec
    cost_model: Annotated[CostModel, AfterValidator(_costs)]  # seconds of a step (KunServe Eq. 1-3)
    held_back_error: AtLeastZero  # mean relative error on batches that it was not fitted on
    num_samples: Count
    max_num_batched_tokens: Count  # that the batches had at most
    kv_tokens: Count  # that the engine had room for
    block_size: Count
    engine: Mapping[str, Any] = field(default_factory=dict)  # vLLM's settings
    host_s: AtLeastZero = 0.0  # of a step: what is no work of layers, and whole in every stage of a pipeline
    aliases: tuple[str, ...] = ()
    source: str


Row = TypeVar("Row", Gpu, ModelSpec, Profile)


@dataclass(frozen=True, slots=True)
class Catalog:
    """All rows, by their names. Later files come first where names are the same."""

    gpus: Mapping[str, Gpu]
    models: Mapping[str, ModelSpec]
    profiles: Mapping[str, Profile]

    def gpu(self, name: str) -> Gpu:
        """The GPU of this name or alias; case, dashes and underscores do not matter.

        Raises:
            ConfigError: there is none; names those that are written alike.
        """
        return _find("GPU", self.gpus, name)

    def model(self, name: str) -> ModelSpec:
        """The model of this name, as Hugging Face writes it or shorter: `Qwen/Qwen2.5-14B-Instruct`, `qwen2.5-14b`.

        Raises:
            ConfigError: there is none; names those that are written alike.
        """
        return _find("model", self.models, name)

    def profile(self, name: str) -> Profile:
        """The profile of this name.

        Raises:
            ConfigError: there is none; names those that are written alike.
        """
        return _find("profile", self.profiles, name)


def gpu(name: str) -> Gpu:
    """A GPU of this package. Raises: as `Catalog.gpu`."""
    return load_catalog().gpu(name)


def model(name: str) -> ModelSpec:
    """A model of this package. Raises: as `Catalog.model`."""
    return load_catalog().model(name)


def load_catalog(*paths: str | Path) -> Catalog:
    """The rows of this package, and those of the user's files, whose rows replace others of the same name.

    Raises:
        ConfigError: a file cannot be read, or a row is wrong; names file, row and field.
    """
    found = _built_in()
    for path in paths:
        found = _merge(found, _read(Path(path)))
    return found


@cache
def _built_in() -> Catalog:
    found = Catalog({}, {}, {})
    for name in BUILT_IN:
        found = _merge(found, _parse(name, files(__package__).joinpath(name).read_text(encoding="utf-8")))
    return found


def _merge(first: Catalog, second: Catalog) -> Catalog:
    return Catalog(
        {**second.gpus, **{name: row for name, row in first.gpus.items() if name not in second.gpus}},
        {**second.models, **{name: row for name, row in first.models.items() if name not in second.models}},
        {**second.profiles, **{name: row for name, row in first.profiles.items() if name not in second.profiles}},
    )


def _read(path: Path) -> Catalog:
    try:
        return _parse(str(path), path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the catalog {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the catalog {path} is not text in UTF-8: save it as YAML") from None


def _parse(source: str, text: str) -> Catalog:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = f" in line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        raise ConfigError(f"{source} is not YAML{where}: {getattr(error, 'problem', None) or error}") from None
    data = {} if data is None else data
    if not isinstance(data, dict) or (unknown := [key for key in data if key not in ("gpus", "models", "profiles")]):
        what = f"has {unknown[0]!r}" if isinstance(data, dict) else "is no mapping"
        raise ConfigError(f"{source} {what}: a catalog has gpus, models and profiles, each a mapping of names to rows")
    return Catalog(
        _rows(Gpu, source, "gpus", data), _rows(ModelSpec, source, "models", data),
        _rows(Profile, source, "profiles", data),
    )  # fmt: skip


def _rows(kind: type[Row], source: str, section: str, data: Mapping[str, Any]) -> dict[str, Row]:
    rows = data.get(section) or {}
    if not isinstance(rows, dict):
        raise ConfigError(f"{source}: {section} must be a mapping of names to rows")
    return {str(name): _row(kind, f"{source}: {section}.{name}", str(name), row) for name, row in rows.items()}


def _row(kind: type[Row], where: str, name: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be a mapping of fields to values")
    data = {**row, "name": name}
    if kind is Profile and isinstance(row.get("model"), dict):
        data["model"] = {"name": name, "source": str(row.get("source", "")), **row["model"]}
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field_name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{where}.{field_name}: {_reason(first)}") from None


def _reason(error: Any) -> str:
    match error["type"]:
        case "missing":
            return "is missing: add it"
        case "unexpected_keyword_argument" | "extra_forbidden":
            return "is no field of such a row: leave it out"
        case _:
            return f"{error['msg'][0].lower()}{error['msg'][1:]}, not {error['input']!r}"


def _find(kind: str, rows: Mapping[str, Row], name: str) -> Row:
    wanted = _plain(name)
    for known in rows.values():
        if wanted in _names(known):
            return known
    raise ConfigError(f"no {kind} is called {name!r}; {_near(wanted, rows.values())}, or describe yours in a catalog")


def _near(wanted: str, rows: Iterable[Gpu | ModelSpec | Profile]) -> str:
    names = {written: row.name for row in rows for written in _names(row)}
    matches = difflib.get_close_matches(wanted, names, n=8, cutoff=0.5)
    near = list(dict.fromkeys(names[match] for match in matches))[:4]
    return (
        f"near it are {', '.join(near)}: take one" if near else f"take one of {', '.join(sorted(set(names.values())))}"
    )


def _names(row: Gpu | ModelSpec | Profile) -> list[str]:
    return [_plain(written) for written in (row.name, *row.aliases)]


def _plain(name: str) -> str:
    """`Qwen/Qwen2.5-14B-Instruct` -> `qwen2.514b`."""
    return re.sub(r"[^a-z0-9.]", "", SUFFIX.sub("", name.lower().rsplit("/", 1)[-1]))
