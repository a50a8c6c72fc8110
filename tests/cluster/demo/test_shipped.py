"""The checkpoint in the repository is whole, small, and the one that the recipe's shape gives."""

import json

import pytest

from pengserve.cluster.demo.make import DEMO, SAMPLING
from pengserve.cluster.demo.shipped import shipped_model

MAX_BYTES = 8_000_000


def test_it_is_whole_and_small() -> None:
    files = {path.name: path.stat().st_size for path in shipped_model().iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert sum(files.values()) <= MAX_BYTES


def test_it_has_the_shape_and_sampling_of_the_recipe() -> None:
    config = json.loads((shipped_model() / "config.json").read_text())
    sizes = (config["vocab_size"], config["hidden_size"], config["num_hidden_layers"], config["num_key_value_heads"])
    assert sizes == (DEMO.vocab_size, DEMO.hidden_size, DEMO.num_layers, DEMO.num_kv_heads)
    generation = json.loads((shipped_model() / "generation_config.json").read_text())
    assert {name: generation[name] for name in SAMPLING} == SAMPLING


def test_its_weights_are_bfloat16_and_all_there() -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(shipped_model() / "model.safetensors", framework="numpy") as weights:
        dtypes = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert set(dtypes.values()) == {"BF16"}
    assert sum(".q_proj." in name for name in dtypes) == DEMO.num_layers
