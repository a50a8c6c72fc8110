"""Linear weights in the order that oneDNN's kernels read, packed where they lie.

A product with some rows takes half to two thirds of the time on a CPU when its weight is packed
(`benchmarks/results/gemm.md`). vLLM packs into memory of its own, which could not become KV. Here a weight keeps its
address and its size: only the order of its numbers changes, so that its bytes can be dropped, sent to a member that
packs alike, and put back.

PyTorch packs for its compiler (`_reorder_linear_weight`), and its stable C interface makes a tensor of packed bytes at
any address; both are private names of PyTorch 2.13, used here alone.
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch

NUM_ROWS = 32  # that the order is made for; vLLM asks for the same
_C_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The product with a packed weight."""

    home: torch.Tensor  # whose bytes these are; held, as `packed` does not own them
    packed: torch.Tensor  # `[out, in]`
    order: bytes  # oneDNN's description: bytes of one order are no weight in another

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x @ weight.T + bias`. What vLLM passes as the weight is not looked at."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, bias, "none", [], "")
        return product


def pack_in_place(weight: torch.Tensor) -> PackedLinear | None:
    """Packs `weight` (`[out, in]`, contiguous, on CPU) and gives the product with it.

    The packed bytes replace those in plain order, so no other code may read `weight` from then on. None, and nothing
    has changed, where it cannot be packed into its own bytes: an odd size, another type or another PyTorch.
    """
    if weight.dtype not in _C_TYPES or weight.dim() != 2 or not weight.is_contiguous() or weight.is_cuda:
        return None
    try:
        with torch.inference_mode(mode=False):
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), NUM_ROWS)
            if not packed.is_mkldnn or torch.ops.mkldnn._nbytes(packed) != weight.nbytes:
                return None
            layout = torch.ops.mkldnn._get_mkldnn_serialized_md(packed)
            view = _tensor_at(weight, layout)
    except (AttributeError, RuntimeError):
        return None
    ctypes.memmove(weight.data_ptr(), torch.ops.mkldnn.data_ptr(packed), weight.nbytes)
    return PackedLinear(weight, view, layout.numpy().tobytes())


def _tensor_at(weight: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
    """A packed tensor over the bytes of `weight`, which it does not own, in the order that `layout` describes.

    Raises:
        AttributeError, RuntimeError: this PyTorch cannot.
    """
    library = _library()
    num_dims = weight.dim()
    integers = ctypes.c_int64 * num_dims
    handle = ctypes.c_void_p()
    is_failed = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(weight.data_ptr()),
        ctypes.c_int64(num_dims),
        integers(*weight.shape),
        integers(*weight.stride()),
        ctypes.c_int64(0),
        ctypes.c_int32(getattr(library, f"aoti_torch_dtype_{_C_TYPES[weight.dtype]}")()),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(-1),
        ctypes.byref(handle),
        ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
        ctypes.c_void_p(layout.data_ptr()),
        ctypes.c_int64(layout.numel()),
    )
    if is_failed:
        raise RuntimeError("PyTorch made no packed tensor")
    tensor: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(handle))
    return tensor


def _capsule(handle: ctypes.c_void_p) -> object:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule: object = make(handle, None, None)
    return capsule


@functools.cache
def _library() -> ctypes.CDLL:
    """PyTorch's own library, already loaded.

    Raises:
        RuntimeError: there is none of this name.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"{path} cannot be opened: {error}") from None
