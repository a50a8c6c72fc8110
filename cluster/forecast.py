"""Which shapes a model will work in on the devices that are there, and whether it fits. Before anything is loaded.

What is missed here an instance finds when it builds the shape: it serves alone then, and says why.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pengserve.cluster.gpus import Gpus
from pengserve.cluster.settings import Settings
from pengserve.planners.types.units import GIB, format_bytes

GPU_SHARE = 0.92  # vLLM's own default for engine.gpu_memory_utilization
BESIDE_BYTES = 1 * GIB  # activations, graphs and CUDA itself; measured when the instance starts
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's directory says of it."""

    weight_bytes: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    token_bytes: int  # KV of one token
    max_len: int
    is_quantised: bool = False
    has_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeForecast:
    """One shape; `why_not` is empty where it will work."""

    shape: str
    why_not: str = ""
    remark: str = ""


def read_facts(directory: Path, settings: Settings) -> ModelFacts | None:
    """Facts of a Hugging Face directory; None where its config.json does not tell them."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        return _facts(config, sum(file.stat().st_size for file in directory.glob("*.safetensors")), settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _facts(config: Mapping[str, Any], weight_bytes: int, settings: Settings) -> ModelFacts:
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
    dtype = settings.engine.get("dtype", config.get("dtype", config.get("torch_dtype")))
    num_layers = int(config["num_hidden_layers"])
    return ModelFacts(
        weight_bytes=weight_bytes,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        token_bytes=2 * num_layers * kv_heads * head_size * (4 if dtype == "float32" else 2),
        max_len=int(float(settings.engine.get("max_model_len") or config.get("max_position_embeddings") or 0)),
        is_quantised=bool(config.get("quantization_config") or settings.engine.get("quantization")),
        has_experts=any(config.get(name) for name in _EXPERTS),
    )


def forecast_shapes(settings: Settings, facts: ModelFacts, gpus: Gpus | None) -> Iterator[ShapeForecast]:
    """Every shape that the settings ask for; their number of instances must be known."""
    general = _why_alone(settings, facts)
    for degree in settings.degrees:
        why_not = general or _why_not_split(facts, degree)
        yield ShapeForecast(shape=f"tp{degree}", why_not=why_not, remark="" if why_not else _links(gpus, degree))
    for stages in (1 << power for power in range(1, settings.max_stages.bit_length())):
        too_few = f"the model has {facts.num_layers} layers" if facts.num_layers < stages else ""
        yield ShapeForecast(shape=f"pp{stages}", why_not=general or too_few)


def _why_alone(settings: Settings, facts: ModelFacts) -> str:
    if facts.has_experts:
        return "mixture-of-experts layers have no views of their weights"
    if facts.is_quantised:
        return "quantised weights have no views"
    asked = next((name for name in ("speculative_config", "enable_lora") if settings.engine.get(name)), "")
    return f"engine.{asked} works in dp alone" if asked else ""


def _why_not_split(facts: ModelFacts, degree: int) -> str:
    if facts.num_heads % degree:
        return f"{facts.num_heads} attention heads do not split into {degree}"
    wide, narrow = max(facts.num_kv_heads, degree), min(facts.num_kv_heads, degree)
    return f"{facts.num_kv_heads} KV heads do not split into {degree}" if wide % narrow else ""


def _links(gpus: Gpus | None, degree: int) -> str:
    """How groups of neighbours of this degree are connected."""
    if gpus is None or len(gpus.found) < degree:
        return ""
    groups = [gpus.found[start : start + degree] for start in range(0, len(gpus.found) - degree + 1, degree)]
    if all(map(gpus.have_nvlink, groups)):
        return "over NVLink"
    return "over PCIe: sums are slower than over NVLink, so it pays for long prompts and large models"


def missing_bytes(settings: Settings, facts: ModelFacts, gpus: Gpus) -> tuple[int, str]:
    """How much the smallest device lacks for the model and its longest request, and of what; at most 0 where it fits.

    Where instances change their shape, `dp` takes as long requests as fit, and one of a few hundred tokens must.
    """
    share = float(settings.engine.get("gpu_memory_utilization") or GPU_SHARE)
    smallest = min(gpus.found, key=lambda gpu: gpu.total_bytes)
    weights = facts.weight_bytes // settings.num_workers
    length = min(facts.max_len, 512) if settings.degrees or settings.max_stages > 1 else facts.max_len
    kv_bytes = length * facts.token_bytes // settings.num_workers
    needed = weights + kv_bytes + BESIDE_BYTES
    has = int(smallest.total_bytes * share)
    text = (
        f"{format_bytes(weights)} of weights, {format_bytes(kv_bytes)} of KV for a request of {length:,} tokens and"
        f" about {format_bytes(BESIDE_BYTES)} beside them, of {format_bytes(has)} ({share:.0%} of {smallest.name})"
    )
    return needed - has, text
