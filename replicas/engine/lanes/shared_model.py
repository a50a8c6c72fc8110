"""A tensor-parallel model that owns no weights: vLLM's own class built on `meta`, over views of the base model.

Flying Serving section 4.1. The dense families in vLLM's own classes work (Llama, Qwen2, Qwen3, Mistral): their
parameters are linear layers, embeddings and norms. Anything else raises `UnsupportedShapeError`, for that lane alone.
"""

import contextlib
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from pengserve.planners.types.errors import UnsupportedShapeError
from pengserve.planners.types.units import MIB
from pengserve.replicas.engine.vllm_seam import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    ParallelLMHead,
    PPMissingLayer,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    VocabParallelEmbedding,
)
from pengserve.replicas.memory.packed_weights import pack_in_place
from pengserve.replicas.memory.weight_views import Shard, column_parts, new_bytes, qkv_parts, row_shard

logger = logging.getLogger(__name__)

_LINEARS = (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear)
_EMBEDDINGS = (VocabParallelEmbedding, ParallelLMHead)
_PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)

# With fewer rows, and over weights that a core's own cache holds, MKL wins over oneDNN, which lays every weight out
# anew (float32, measured with benchmarks/gemm.py). By size, not by a trial: all instances compute alike.
_ONEDNN_MIN_ROWS = 4
_ONEDNN_MIN_BYTES = 4 * MIB


def gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` for weights that must stay as they are: nothing is packed, `weight` may be a view."""
    is_onednn = x.shape[0] >= _ONEDNN_MIN_ROWS and weight.nbytes >= _ONEDNN_MIN_BYTES
    if is_onednn and weight.dtype is torch.float32 and weight.is_contiguous() and not x.is_cuda:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return nn.functional.linear(x, weight, bias)


@contextlib.contextmanager
def plain_weights() -> Iterator[None]:
    """While this is entered, models are loaded without vLLM's packing of CPU weights, so that lanes can view them."""

    def keep(self: object, layer: nn.Module) -> None:
        # `gemm` hands small weights on to torch: asked once here, and not with each product.
        layer.cpu_linear = gemm if layer.weight.nbytes >= _ONEDNN_MIN_BYTES else nn.functional.linear

    before = [method.process_weights_after_loading for method in _PLAIN_METHODS]
    for method in _PLAIN_METHODS:
        method.process_weights_after_loading = keep
    try:
        yield
    finally:
        for method, original in zip(_PLAIN_METHODS, before, strict=True):
            method.process_weights_after_loading = original


def pack_linears(model: nn.Module) -> int:
    """Packs the linear weights of a model that was loaded under `plain_weights`, where they lie.

    Products are then as fast as vLLM's own on CPUs, and no lane can view parts of these weights. Embeddings, and heads
    that are tied to them, stay as they are: their rows are looked up. Weights that oneDNN would pad stay too, and the
    log says so.

    Returns a checksum of the orders that were chosen: members among which it differs must not exchange weights.
    """
    checksum, plain = 0, []
    read_by_row = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    }
    for name, module in model.named_modules():
        is_linear = type(module) in (*_LINEARS, ParallelLMHead) and type(module.quant_method) in _PLAIN_METHODS
        if is_linear and id(module.weight) not in read_by_row:
            packed = pack_in_place(module.weight.data)
            if packed is not None:
                module.cpu_linear = packed
            else:
                plain.append(f"{name} ({' x '.join(map(str, module.weight.shape))})")
            checksum = zlib.crc32(packed.order if packed is not None else b"plain", checksum)
    if plain:
        logger.warning(
            "%d weights, such as %s, cannot be packed into their own bytes, and products with them take up to twice as "
            "long: oneDNN packs most sizes of which both numbers are multiples of 64",
            len(plain),
            plain[0],
        )
    return checksum


class ViewMethod(UnquantizedLinearMethod):
    """Applies a layer through views of another model's weight, one per fused part."""

    def __init__(self, views: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
        self.views, self.biases = list(views), list(biases)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x` times each view, side by side. `bias` only says whether to add one: the parts have their own."""
        if len(self.views) == 1:
            return gemm(x, self.views[0], self.biases[0] if bias is not None else None)
        biases = self.biases if bias is not None else [None] * len(self.views)
        return torch.cat([gemm(x, *part) for part in zip(self.views, biases, strict=True)], -1)

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """The viewed rows of the embedding, by token id."""
        return nn.functional.embedding(input_, self.views[0])


def check_supported(base: nn.Module) -> None:
    """Whether a lane can view this model.

    Raises:
        UnsupportedShapeError: it has layers whose weights are quantised, or of a kind that has no view.
    """
    for name, module in base.named_modules():
        if "FusedMoE" in type(module).__name__:
            raise UnsupportedShapeError(f"mixture-of-experts layers ({name}) have no views; serve it in dp alone")
    for name, module in base.named_modules():
        if isinstance(module, (LinearBase, *_EMBEDDINGS)):
            if type(module) not in (*_LINEARS, *_EMBEDDINGS):
                raise UnsupportedShapeError(f"layers of type {type(module).__name__} ({name}) have no weight views yet")
            if type(module.quant_method) not in _PLAIN_METHODS:
                raise UnsupportedShapeError(f"quantised weights ({name}) have no views; serve this model in dp alone")


def share_weights(model: nn.Module, base: nn.Module, shard: Shard) -> None:
    """Gives `model`, built on `meta` for `shard`, the storage of `base`; afterwards it has no byte of its own.

    Raises:
        UnsupportedShapeError: a weight of it does not split, or belongs to a kind of layer that has no view.
    """
    ours = dict(base.named_modules(remove_duplicate=False))
    _share_rotary(model, ours)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, (LinearBase, *_EMBEDDINGS)) and not isinstance(module, ReplicatedLinear):
            _share_sharded(name, module, ours[name], shard)
        else:
            _share_whole(name, module, ours[name])
    _require_real(model)
    copied = new_bytes(viewed_tensors(model), [*base.parameters(), *base.buffers()])
    assert copied == 0, f"{copied} bytes of parameters were copied"
    model.eval()


def share_layers(model: nn.Module, base: nn.Module) -> None:
    """Gives `model`, one stage of a pipeline built on `meta`, the parameters of `base` themselves.

    Raises:
        UnsupportedShapeError: it has something that `base` has not, or vLLM cannot cut it into stages.
    """
    if not hasattr(model, "make_empty_intermediate_tensors"):
        raise UnsupportedShapeError(f"{type(model).__name__} cannot be cut into stages")
    ours = dict(base.named_modules(remove_duplicate=False))
    _share_rotary(model, ours)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, PPMissingLayer):
            _share_whole(name, module, ours[name])
    _require_real(model)
    model.eval()


def viewed_tensors(model: nn.Module) -> list[torch.Tensor]:
    """All weights and buffers that a shared model computes with."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, ViewMethod):
            tensors += [*method.views, *(bias for bias in method.biases if bias is not None)]
    return tensors


def _share_rotary(model: nn.Module, ours: Mapping[str, nn.Module]) -> None:
    for name, module in list(model.named_modules(remove_duplicate=False)):
        for child_name, child in list(module.named_children()):
            if "rotary" in type(child).__name__.lower():  # holds tables, not weights, and is the same for all ranks
                setattr(module, child_name, getattr(ours[name], child_name))


def _require_real(model: nn.Module) -> None:
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if left:
        raise UnsupportedShapeError(f"{left[0]} has no view of the base model's weights")


def _share_whole(name: str, module: nn.Module, base: nn.Module) -> None:
    for kind in ("_parameters", "_buffers"):
        for key, tensor in list(getattr(module, kind).items()):
            if tensor is None:
                continue
            theirs = getattr(base, kind).get(key)
            if theirs is None or theirs.shape != tensor.shape:
                raise UnsupportedShapeError(f"{name}.{key} is sharded in a way that has no view")
            getattr(module, kind)[key] = theirs
    if hasattr(base, "cpu_linear"):
        module.cpu_linear = base.cpu_linear


def _share_sharded(name: str, module: nn.Module, base: nn.Module, shard: Shard) -> None:
    bias = base._parameters.get("bias")
    views = _views(module, base, base.weight.data, shard)
    if isinstance(module, RowParallelLinear):
        biases: list[torch.Tensor | None] = [bias]  # added by rank 0 alone, and whole
    else:
        biases = list(_views(module, base, bias.data, shard)) if bias is not None else [None] * len(views)
    module.quant_method = ViewMethod(views, biases)
    if isinstance(module, _EMBEDDINGS):  # vLLM's CUDA kernel for embeddings reads the weight itself
        module._parameters["weight"] = nn.Parameter(views[0], requires_grad=False)
    else:
        del module._parameters["weight"]
    if bias is not None:
        shown = bias.data if isinstance(module, RowParallelLinear) else biases[0]
        module._parameters["bias"] = nn.Parameter(shown, requires_grad=False)


def _views(module: nn.Module, base: nn.Module, tensor: torch.Tensor, shard: Shard) -> list[torch.Tensor]:
    if isinstance(module, RowParallelLinear):
        return [row_shard(tensor, shard)]
    if isinstance(module, QKVParallelLinear):
        return qkv_parts(
            tensor,
            num_heads=base.total_num_heads,
            num_kv_heads=base.total_num_kv_heads,
            head_size=base.head_size,
            shard=shard,
        )
    if isinstance(module, MergedColumnParallelLinear):
        return column_parts(tensor, base.output_sizes, shard)
    return column_parts(tensor, [tensor.shape[0]], shard)
