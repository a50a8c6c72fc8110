"""Laws of packed weights: the product is the same, the bytes stay where they are, and they may go and come back."""

import pytest
import torch
from torch.nn import functional

from pengserve.replicas.memory.packed_weights import PackedLinear, pack_in_place

DTYPES = [torch.float32, torch.bfloat16]
CLOSE = {  # sums of hundreds of products of magnitude 1, rounded in another order
    torch.float32: {"rtol": 1e-5, "atol": 1e-4},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 0.1},
}


def packed_or_skip(weight: torch.Tensor) -> PackedLinear:
    """The product with `weight`, which is packed now; skips on CPUs whose oneDNN packs into another size."""
    product = pack_in_place(weight)
    if product is None:
        pytest.skip("this CPU's packed weights have another size")
    return product


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3, 4, 16, 65])
@pytest.mark.parametrize("shape", [(192, 128), (128, 384), (1152, 384)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_is_that_of_the_plain_weight(
    dtype: torch.dtype, num_rows: int, shape: tuple[int, int], has_bias: bool
) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(shape).to(dtype), torch.randn(num_rows, shape[1]).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    expected = functional.linear(x, weight, bias)
    product = packed_or_skip(weight)
    with torch.inference_mode():
        found = product(x, weight, bias)
    torch.testing.assert_close(found, expected, **CLOSE[dtype])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(256, 128), torch.randn(48, 128)
    product = packed_or_skip(weight)
    whole = product(x, weight, None)
    for first in range(0, 48, 16):
        part = product(x[first : first + 16].contiguous(), weight, None)
        torch.testing.assert_close(part, whole[first : first + 16], **CLOSE[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_may_be_dropped_and_come_back(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    arena = torch.zeros(1 << 20, dtype=torch.uint8)
    source = torch.randn(256, 128).to(dtype)
    home = arena[4096 : 4096 + source.nbytes].view(dtype).view(source.shape)
    home.copy_(source)
    x = torch.randn(4, 128).to(dtype)
    product = packed_or_skip(home)
    before = product(x, home, None)
    copy = home.clone()
    home.zero_()
    assert not product(x, home, None).any()
    home.copy_(copy)
    assert torch.equal(product(x, home, None), before)
    assert not arena[:4096].any() and not arena[4096 + source.nbytes :].any()


def test_two_members_pack_alike() -> None:
    source = torch.randn(192, 128)
    first, second = source.clone(), source.clone()
    packed_or_skip(first)
    packed_or_skip(second)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "weight", [torch.zeros(4, 4, dtype=torch.int8), torch.zeros(8), torch.zeros(8, 8).t()[:, :4], torch.zeros(2, 3, 4)]
)
def test_what_cannot_be_packed_stays(weight: torch.Tensor) -> None:
    before = weight.clone()
    assert pack_in_place(weight) is None
    assert torch.equal(weight, before)
