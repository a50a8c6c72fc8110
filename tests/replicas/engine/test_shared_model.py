"""Laws of shared models: each rank's views are exactly what vLLM itself would have loaded there, and no byte is new."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
from torch import nn

from pengserve.planners.types.errors import UnsupportedShapeError

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 32,
}
FAMILIES = ["Llama", "Qwen2", "Qwen3", "Mistral"]


def checkpoint(family: str, directory: Path, **changes: Any) -> Path:
    """A tiny random checkpoint of a family, with biases that are not zero."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    model.save_pretrained(str(directory))
    return directory


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """vLLM's process groups of one, and who may exchange its tensor-parallel one."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    from pengserve.replicas.engine.lanes.lane_groups import ActiveGroup

    _set_torch_accelerator_to_noop()  # as vLLM's CPU runner does before it loads a model
    if parallel_state._TP is None:
        current_platform.register_triton_kernel_overrides()
        from vllm.config import VllmConfig, set_current_vllm_config

        with set_current_vllm_config(VllmConfig()):
            parallel_state.init_distributed_environment(1, 0, "tcp://127.0.0.1:29655", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
    yield ActiveGroup()


def build(directory: Path, active: Any, rank: int = 0, degree: int = 1, *, on_meta: bool = False) -> nn.Module:
    """The model as vLLM builds and loads it on one rank; on `meta` it is only built."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    from pengserve.replicas.engine.lanes.lane_groups import LaneGroup
    from pengserve.replicas.engine.lanes.shared_model import plain_weights
    from pengserve.replicas.engine.vllm_seam import (
        initialize_model,
        set_current_vllm_config,
        set_default_torch_dtype,
    )

    arguments = EngineArgs(
        model=str(directory), skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=256
    )
    config = arguments.create_engine_config()
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = degree
    config.parallel_config.rank = rank
    before = active.activate(LaneGroup("tp", "test", rank, degree) if degree > 1 else None)
    try:
        with plain_weights(), set_current_vllm_config(config):
            if not on_meta:
                return get_model(vllm_config=config)
            with set_default_torch_dtype(torch.float32), torch.device("meta"):
                return initialize_model(config)
    finally:
        active.activate(before)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights and biases that a model computes with, by name; the parts of a shared layer joined."""
    from pengserve.replicas.engine.lanes.shared_model import ViewMethod

    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found[f"{name}.{key}"] = parameter.data
        if isinstance(method, ViewMethod):
            found[f"{name}.weight"] = torch.cat(method.views)
            if method.biases[0] is not None:
                found[f"{name}.bias"] = torch.cat([bias for bias in method.biases if bias is not None])
    return found


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_views_are_what_vllm_loads(world: Any, tmp_path: Path, family: str, degree: int) -> None:
    from pengserve.replicas.engine.lanes.shared_model import check_supported, share_weights, viewed_tensors
    from pengserve.replicas.memory.weight_views import Shard, new_bytes

    directory = checkpoint(family, tmp_path)
    base = build(directory, world)
    check_supported(base)
    for rank in range(degree):
        shared = build(directory, world, rank, degree, on_meta=True)
        share_weights(shared, base, Shard(rank, degree))
        assert new_bytes(viewed_tensors(shared), [*base.parameters(), *base.buffers()]) == 0
        expected, found = weights(build(directory, world, rank, degree)), weights(shared)
        embedding = shared.get_submodule("model.embed_tokens").weight
        assert torch.equal(embedding, expected["model.embed_tokens.weight"]), "what vLLM's CUDA kernel reads"
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(found[name], weight), f"rank {rank} of {degree}: {name}"


def test_tied_embeddings_are_shared(world: Any, tmp_path: Path) -> None:
    from pengserve.replicas.engine.lanes.shared_model import share_weights
    from pengserve.replicas.memory.weight_views import Shard

    directory = checkpoint("Llama", tmp_path, tie_word_embeddings=True)
    base = build(directory, world)
    shared = build(directory, world, 1, 2, on_meta=True)
    share_weights(shared, base, Shard(1, 2))
    expected = weights(build(directory, world, 1, 2))["model.embed_tokens.weight"]
    assert torch.equal(shared.lm_head.quant_method.views[0], expected)


def test_experts_are_refused_with_a_sentence(world: Any, tmp_path: Path) -> None:
    from pengserve.replicas.engine.lanes.shared_model import check_supported

    directory = checkpoint("Mixtral", tmp_path, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(UnsupportedShapeError, match="mixture-of-experts"):
        check_supported(build(directory, world))


def test_heads_that_do_not_split_are_refused(world: Any, tmp_path: Path) -> None:
    from pengserve.replicas.memory.weight_views import Shard, qkv_parts

    with pytest.raises(UnsupportedShapeError, match="do not split"):
        qkv_parts(torch.zeros(5, 4), num_heads=3, num_kv_heads=1, head_size=1, shard=Shard(0, 2))


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "is_onednn"), [(3, 4096, False), (4, 4096, True), (64, 512, False)]
)
def test_products_over_plain_weights_are_those_of_the_faster_library(
    num_rows: int, num_outputs: int, is_onednn: bool
) -> None:
    from pengserve.replicas.engine.lanes.shared_model import gemm

    x, weight = torch.randn(num_rows, 512), torch.randn(num_outputs, 512)
    mkl = torch.nn.functional.linear(x, weight)
    onednn = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    assert torch.equal(gemm(x, weight), onednn if is_onednn else mkl)
    torch.testing.assert_close(mkl, onednn, rtol=1e-4, atol=1e-4)


def test_weights_that_cannot_be_packed_are_told_of_once(
    world: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from pengserve.replicas.engine.lanes.shared_model import pack_linears

    odd = build(checkpoint("Llama", tmp_path, intermediate_size=208), world)  # 416 outputs: oneDNN pads them
    with caplog.at_level(logging.WARNING):
        pack_linears(odd)
    if not is_packed(odd.model.layers[0].self_attn.qkv_proj):
        pytest.skip("this CPU's packed weights have another size")
    assert [is_packed(module) for module in (odd.model.layers[1].mlp.gate_up_proj, odd.lm_head)] == [False, True]
    (told,) = of_ours(caplog)
    assert told.startswith("2 weights, such as model.layers.0.mlp.gate_up_proj (416 x 128),")


def test_nothing_is_told_where_all_are_packed(world: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from pengserve.replicas.engine.lanes.shared_model import pack_linears

    model = build(checkpoint("Llama", tmp_path), world)
    with caplog.at_level(logging.WARNING):
        pack_linears(model)
    if not is_packed(model.lm_head):
        pytest.skip("this CPU's packed weights have another size")
    assert of_ours(caplog) == []


def is_packed(module: Any) -> bool:
    from pengserve.replicas.memory.packed_weights import PackedLinear

    return isinstance(module.cpu_linear, PackedLinear)


def of_ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("pengserve")]
