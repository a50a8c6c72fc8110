"""Laws of the forecast: which shapes will work, and how much memory is missing."""

from dataclasses import replace
from typing import Any

import pytest

from pengserve.cluster.forecast import BESIDE_BYTES, ModelFacts, forecast_shapes, missing_bytes
from pengserve.cluster.gpus import Gpu, Gpus
from pengserve.cluster.settings import Settings
from pengserve.cluster.settings_sources import load_settings

GIB = 1 << 30
FACTS = ModelFacts(  # Qwen3-4B
    weight_bytes=8 * GIB, num_layers=36, num_heads=32, num_kv_heads=8, token_bytes=147_456, max_len=40_960
)


def settings(count: int = 8, **changes: Any) -> Settings:
    """Of instances that change their shape."""
    instances = {"count": count, "device": "cuda", "memory_bytes": "auto"}
    shape = {"cuda": "experimental", "drop": {"max_stages": 2}}
    return load_settings(None, model="m", instances=instances, shape=shape, **changes)


def rigid(**engine: Any) -> Settings:
    """Of one instance that does not."""
    return load_settings(None, model="m", instances={"count": 1, "device": "cuda"}, engine=engine)


def gpus(count: int, link: str = "NV18", total: int = 80 * GIB) -> Gpus:
    found = tuple(Gpu(index=i, name="H", driver="5", total_bytes=total, free_bytes=total) for i in range(count))
    return Gpus(found=found, links={(a, b): link for a in range(count) for b in range(a + 1, count)})


def why_not(facts: ModelFacts) -> dict[str, str]:
    return {found.shape: found.why_not for found in forecast_shapes(settings(), facts, gpus(8))}


def test_a_plain_model_works_in_every_shape_that_is_asked_for() -> None:
    assert why_not(FACTS) == dict.fromkeys(("tp2", "tp4", "tp8", "pp2"), "")
    assert list(forecast_shapes(rigid(), FACTS, gpus(1))) == []


@pytest.mark.parametrize(
    ("changes", "shapes", "said"),
    [
        ({"num_heads": 14, "num_kv_heads": 2}, {"tp4", "tp8"}, "14 attention heads do not split into"),
        ({"num_heads": 24, "num_kv_heads": 6}, {"tp4", "tp8"}, "6 KV heads do not split into"),
        ({"is_quantised": True}, {"tp2", "tp4", "tp8", "pp2"}, "quantised"),
        ({"has_experts": True}, {"tp2", "tp4", "tp8", "pp2"}, "mixture-of-experts"),
        ({"num_layers": 1}, {"pp2"}, "has 1 layers"),
    ],
)
def test_a_shape_that_will_not_work_says_why(changes: dict[str, Any], shapes: set[str], said: str) -> None:
    found = why_not(replace(FACTS, **changes))
    assert {shape for shape, why in found.items() if said in why} == {shape for shape, why in found.items() if why}
    assert {shape for shape, why in found.items() if why} == shapes


def test_how_groups_are_connected_is_told() -> None:
    for link, said in (("NV18", "NVLink"), ("SYS", "PCIe")):
        found = {f.shape: f.remark for f in forecast_shapes(settings(2), FACTS, gpus(2, link))}
        assert said in found["tp2"] and found["pp2"] == ""


def test_what_is_missing_is_told_to_the_byte() -> None:
    share = {"gpu_memory_utilization": 0.5}
    plain = rigid(**share)
    needed = FACTS.weight_bytes + FACTS.max_len * FACTS.token_bytes + BESIDE_BYTES
    assert missing_bytes(plain, FACTS, gpus(1))[0] == needed - 40 * GIB < 0
    missing, text = missing_bytes(plain, FACTS, gpus(1, total=24 * GIB))
    assert missing == needed - 12 * GIB > 0 and "8.0 GiB of weights" in text and "40,960 tokens" in text
    elastic = settings(2, engine=share)
    assert missing_bytes(elastic, FACTS, gpus(2, total=24 * GIB))[0] < 0, "dp takes as much context as fits"
    wide = rigid(tensor_parallel_size=2, **share)
    assert missing_bytes(wide, FACTS, gpus(2, total=24 * GIB))[0] < 0, "an engine's workers share weights and KV"
