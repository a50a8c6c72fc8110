"""Coefficients of a GPU, model or degree that was not measured, from those of one that was.

Matrix products take the longer of reading the weights and computing on them; each is scaled by what it is bound by. A
row of degree tp takes more than a tp-th of the same model's row of degree 1: what is beyond it is all-reduces and work
that is not sharded. Small messages cost latency and stay, large ones go with the links, and GPUs with and without
NVLink never stand in for each other: four without it take ten times as long as their bandwidth says.

Measured rows derived from each other come out within 2 % in the mean for another model on the same GPU, 5 % between
H100 and H200, and 10 to 20 % from one generation to the next; tests/simulator/timing/test_roofline.py holds that.
"""

from dataclasses import replace
from math import log
from typing import NamedTuple, TypeAlias

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.hardware.catalog import Catalog, Gpu, ModelSpec, load_catalog
from pengserve.simulator.timing.coefficients import Coefficients, measured

Target: TypeAlias = tuple[Gpu, ModelSpec, int]

LARGE_TOKENS = 2048  # a prefill whose rate counts as what a GPU reaches: vLLM's usual budget of a step
HALF_BYTES = 1 << 20  # an all-reduce of so many bytes is half latency
CERTAIN_ERROR = 0.05  # rows that are further off their own measurements are said to be


def find(gpu: Gpu, model: ModelSpec, tp: int) -> tuple[Coefficients, tuple[str, ...]]:
    """Coefficients of `model` on `tp` of `gpu`, and a sentence for each thing that had to be assumed.

    Raises:
        ConfigError: a mixture of experts, or a degree that does not divide the heads.
    """
    _check(gpu, model, tp)
    rows, catalog = measured(), load_catalog()
    model_name = _nearest_model(model, catalog, {name for _, name, _ in rows})
    gpu_name = _nearest_gpu(gpu, tp, catalog, {key[0] for key in rows if key[1] == model_name})
    degrees = [degree for name, kind, degree in rows if (name, kind) == (gpu_name, model_name)]
    degree = min(degrees, key=lambda measured_tp: abs(log(measured_tp / tp)))
    row, alone = rows[gpu_name, model_name, degree], rows[gpu_name, model_name, 1]
    its_gpu, its_model = catalog.gpu(gpu_name), catalog.model(model_name)
    notes = []
    if row.error > CERTAIN_ERROR:
        notes.append(
            f"Steps of {model_name} on {gpu_name} are off their own measurements by {row.error:.0%}, in the mean."
        )
    if _is_same(gpu, its_gpu, tp) and _is_same_model(model, its_model) and degree == tp:
        return row, tuple(notes)
    notes.insert(0, _sentence(gpu, model, tp, gpu_name, model_name, degree))
    return _scaled(row, alone, (its_gpu, its_model, degree), (gpu, model, tp)), tuple(notes)


class _Side(NamedTuple):
    """A model on tp GPUs, and what of the GPU's data sheet its steps reach."""

    gpu: Gpu
    model: ModelSpec
    tp: int
    bytes_per_s: float
    flops: float

    def bound_s(self, num_tokens: int) -> float:
        """The roofline of all matrix products: the longer of reading the weights and computing."""
        reads_s = self.model.read_bytes / self.bytes_per_s
        return max(reads_s, 2.0 * self.model.layer_params * num_tokens / self.flops) / self.tp


def _sides(alone: Coefficients, source: Target, target: Target) -> tuple[_Side, _Side]:
    """Both with the rates that they reach: the measured one as its table says, the other as is known, or alike."""
    (gpu, model, _), (other, *_) = source, target
    read_share = model.read_bytes / alone.linear_s[0] / gpu.hbm_bytes_per_s
    compute_share = 2.0 * model.layer_params * LARGE_TOKENS / alone.linear(LARGE_TOKENS) / gpu.flops
    return (
        _Side(*source, gpu.hbm_bytes_per_s * read_share, gpu.flops * compute_share),
        _Side(
            *target,
            other.hbm_bytes_per_s * (other.reached_hbm or read_share),
            other.flops * (other.reached_flops or compute_share),
        ),
    )


def _scaled(row: Coefficients, alone: Coefficients, source: Target, target: Target) -> Coefficients:
    old, new = _sides(alone, source, target)
    layers = new.model.layers / old.model.layers
    width = layers * new.model.heads * new.model.head_dim / (old.model.heads * old.model.head_dim)
    kv = _kv_bytes(new.model, new.tp) / _kv_bytes(old.model, old.tp)
    linear = []
    for num, seconds, alone_s in zip(row.num_tokens, row.linear_s, alone.linear_s, strict=True):
        sharded_s = min(seconds, alone_s / old.tp)
        rest_s = _rest(seconds - sharded_s, num, old, new)
        linear.append(sharded_s * new.bound_s(num) / old.bound_s(num) + rest_s)
    return replace(
        row,
        launch_s=row.launch_s * layers,
        sequence_s=row.sequence_s * layers,
        context_s=row.context_s * kv * old.bytes_per_s / new.bytes_per_s,
        pair_s=row.pair_s * width * old.flops / new.flops * old.tp / new.tp,
        linear_s=tuple(linear),
    )


def _rest(seconds: float, num_tokens: int, old: _Side, new: _Side) -> float:
    """What is not sharded: goes with the layers and, as far as it is large all-reduces, with width and links."""
    if old.tp == 1 or new.tp == 1:
        return seconds if old.tp == new.tp else 0.0
    num_bytes = 2.0 * num_tokens * new.model.hidden
    ring = ((new.tp - 1) / new.tp) / ((old.tp - 1) / old.tp)
    links = old.gpu.peer_bytes_per_s / new.gpu.peer_bytes_per_s
    wide = new.model.hidden / old.model.hidden * links * ring
    share = num_bytes / (num_bytes + HALF_BYTES)
    return seconds * new.model.layers / old.model.layers * (1.0 + share * (wide - 1.0))


def _kv_bytes(model: ModelSpec, tp: int) -> float:
    """KV of a token on one GPU; heads are repeated where there are fewer than GPUs."""
    return model.kv_bytes_per_token / min(tp, model.kv_heads)


def _check(gpu: Gpu, model: ModelSpec, tp: int) -> None:
    if model.experts:
        raise ConfigError(
            f"steps of {model.name}, a mixture of experts, were not measured: run `pengserve profile` where it runs"
        )
    if tp < 1 or model.heads % tp:
        raise ConfigError(f"{model.name} has {model.heads} heads, which {tp} GPUs cannot share: take a divisor of it")
    if gpu.name == "cpu":
        raise ConfigError(
            "steps on CPUs depend on too much to be foretold: run `pengserve profile`, and name its profile"
        )


def _nearest_model(model: ModelSpec, catalog: Catalog, names: set[str]) -> str:
    if model.timed_as in names:
        return str(model.timed_as)
    same = [name for name in sorted(names) if (model.bytes_per_param < 1.5) == name.endswith("-fp8")]

    def distance(name: str) -> float:
        other = catalog.model(name)
        shared = other.heads / other.kv_heads, model.heads / model.kv_heads  # queries that share keys
        return abs(log(other.params / model.params)) + abs(log(shared[0] / shared[1]))

    return min(same, key=distance)


def _nearest_gpu(gpu: Gpu, tp: int, catalog: Catalog, names: set[str]) -> str:
    linked = {name for name in names if bool(catalog.gpu(name).nvlink_bytes_per_s) == bool(gpu.nvlink_bytes_per_s)}
    names = linked if tp > 1 and linked else names
    if gpu.timed_as in names:
        return str(gpu.timed_as)

    def distance(name: str) -> float:
        other = catalog.gpu(name)
        return abs(log(other.hbm_bytes_per_s / gpu.hbm_bytes_per_s)) + abs(log(other.flops / gpu.flops))

    return min(sorted(names), key=distance)


def _is_same(gpu: Gpu, other: Gpu, tp: int) -> bool:
    links = tp == 1 or gpu.peer_bytes_per_s == other.peer_bytes_per_s
    return (gpu.hbm_bytes_per_s, gpu.flops) == (other.hbm_bytes_per_s, other.flops) and links


def _is_same_model(model: ModelSpec, other: ModelSpec) -> bool:
    def shape(spec: ModelSpec) -> tuple[float, ...]:
        figures = (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.params)
        return (*figures, spec.bytes_per_param, spec.bytes_per_kv_value)

    return shape(model) == shape(other)


def _sentence(gpu: Gpu, model: ModelSpec, tp: int, gpu_name: str, model_name: str, degree: int) -> str:
    return (
        f"Steps of {model.name} on {tp} x {gpu.name} were not measured: those of {model_name} on {degree} x {gpu_name} "
        f"stand in, scaled by memory bandwidth, FLOPS, links and the models' sizes."
    )
