"""The CUDA backend on a GPU: what the driver, torch's kernels and captured graphs make of memory that moves."""

import gc
import statistics
import threading
import time

import pytest
import torch

from pengserve.planners.types.errors import ConfigError
from pengserve.replicas.memory.arena.arena import Arena, Region
from pengserve.replicas.memory.arena.open import open_arena
from tests.gpu.figures import note_figure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(30),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
CHUNK = 2 * MIB
WIDTH = 256  # float32 elements of a block: a chunk has 2048
BLOCKS = CHUNK // 4 // WIDTH


def opened(num_chunks: int, chunk_bytes: int = CHUNK) -> Arena:
    return open_arena(torch.device("cuda"), num_chunks * chunk_bytes, chunk_bytes)


def weights_and_kv(arena: Arena, num_weights: int, num_kv: int) -> tuple[Region, Region]:
    """Both mapped; the KV region has room for the chunks of the weights."""
    weights = arena.reserve(num_weights * arena.chunk_bytes, "weights")
    kv = arena.reserve((num_weights + num_kv) * arena.chunk_bytes, "kv")
    arena.map(weights, 0, num_weights)
    arena.map(kv, 0, num_kv)
    return weights, kv


def test_a_tensor_is_bound_before_anything_is_mapped() -> None:
    arena = opened(2)
    region = arena.reserve(8 * CHUNK, "r")
    tensor = region.tensor(torch.bfloat16)
    assert tensor.is_cuda and tensor.data_ptr() == region.address and tensor.numel() == 8 * CHUNK // 2
    arena.map(region, 3, 5)
    tensor[3 * CHUNK // 2 : 5 * CHUNK // 2] = 2.0
    assert tensor[3 * CHUNK // 2 : 5 * CHUNK // 2].float().sum().item() == 2.0 * CHUNK
    arena.close()


def test_contents_travel_with_the_chunks() -> None:
    arena = opened(6)
    weights, kv = weights_and_kv(arena, 4, 2)
    words = torch.arange(4 * CHUNK // 8, device="cuda")
    weights.tensor(torch.int64).copy_(words)
    torch.cuda.synchronize()
    arena.move(weights, (1, 3), kv, 2)
    per_chunk = CHUNK // 8
    assert torch.equal(kv.tensor(torch.int64)[2 * per_chunk : 4 * per_chunk], words[per_chunk : 3 * per_chunk])
    torch.cuda.synchronize()
    arena.move(kv, (2, 4), weights, 1)
    assert torch.equal(weights.tensor(torch.int64), words)
    assert arena.check() == ()
    arena.close()


def test_kernels_read_and_write_a_grown_range() -> None:
    arena = opened(6)
    weights, kv = weights_and_kv(arena, 4, 2)
    whole = kv.tensor(torch.float32).view(-1, WIDTH)
    arena.move(weights, (0, 4), kv, 2)
    view, ordinary = whole[: 6 * BLOCKS], torch.randn(6 * BLOCKS, WIDTH, device="cuda")
    view.copy_(ordinary)
    index = torch.tensor([0, 2 * BLOCKS - 1, 2 * BLOCKS, 6 * BLOCKS - 1], device="cuda")
    assert torch.equal(whole.index_select(0, index), ordinary[index])
    whole.index_put_((index,), torch.ones(4, WIDTH, device="cuda"))
    ordinary[index] = 1.0
    assert torch.equal(view, ordinary)
    tail = slice(5 * BLOCKS - 128, 5 * BLOCKS + 128)  # across two chunks
    assert torch.equal(view[tail] @ view[tail].T, ordinary[tail] @ ordinary[tail].T)
    torch.cuda.synchronize()
    arena.close()


def test_a_captured_graph_is_valid_after_a_drop_and_a_restore() -> None:
    arena = opened(6)
    weights, kv = weights_and_kv(arena, 4, 2)
    w, blocks = weights.tensor(torch.float32).view(-1, WIDTH), kv.tensor(torch.float32).view(-1, WIDTH)
    w.copy_(torch.randn_like(w))
    blocks[: 2 * BLOCKS] = 1.0
    index = torch.arange(8, device="cuda")  # which blocks the graph reads; changed between replays
    out = torch.zeros(8, WIDTH, device="cuda")

    def step() -> None:
        out.copy_(blocks.index_select(0, index) @ w[:WIDTH])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    expected = torch.ones(8, WIDTH, device="cuda") @ w[:WIDTH]
    assert torch.equal(out, expected)
    kept = w.clone()

    torch.cuda.synchronize()
    arena.move(weights, (1, 4), kv, 2)  # drop: the graph's own weights stay, the rest becomes KV
    blocks[2 * BLOCKS : 5 * BLOCKS] = 3.0
    index.copy_(torch.arange(5 * BLOCKS - 8, 5 * BLOCKS, device="cuda"))
    graph.replay()
    assert torch.equal(out, torch.full((8, WIDTH), 3.0, device="cuda") @ kept[:WIDTH])

    torch.cuda.synchronize()
    arena.move(kv, (2, 5), weights, 1)  # restore: the memory comes back, its bytes are copied anew
    w.copy_(kept)
    index.copy_(torch.arange(8, device="cuda"))
    graph.replay()
    assert torch.equal(out, expected)
    torch.cuda.synchronize()
    del graph
    arena.close()


def test_a_graph_reads_the_chunks_that_are_behind_its_addresses_now() -> None:
    arena = opened(2)
    a, b = (arena.reserve(CHUNK, name) for name in "ab")
    arena.map(a, 0, 1)
    arena.map(b, 0, 1)
    a.tensor(torch.float32).fill_(1.0)
    b.tensor(torch.float32).fill_(2.0)
    total = torch.zeros((), device="cuda")
    shown = a.tensor(torch.float32)
    shown.mean()  # kernels are loaded outside of the capture
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        total.copy_(shown.mean())
    graph.replay()
    assert total.item() == 1.0
    torch.cuda.synchronize()
    arena.unmap(a, 0, 1)
    arena.move(b, (0, 1), a, 0)
    graph.replay()
    assert total.item() == 2.0
    del graph
    arena.close()


@pytest.mark.parametrize("chunk_bytes", [2 * MIB, 16 * MIB, 64 * MIB])
def test_remap_of_half_the_layers_is_short(chunk_bytes: int) -> None:
    num_layers, per_layer = 16, 256 * MIB // chunk_bytes  # 4 GiB of weights
    arena = opened(num_layers * (per_layer + 1), chunk_bytes)
    weights = [arena.reserve(per_layer * chunk_bytes, f"weights {i}") for i in range(num_layers)]
    kv = [arena.reserve((2 * per_layer + 1) * chunk_bytes, f"kv {i}") for i in range(num_layers)]
    for w, k in zip(weights, kv, strict=True):
        arena.map(w, 0, per_layer)
        arena.map(k, 0, 1)
    half, times_s = num_layers // 2, []
    for _ in range(10):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for i in range(half):
            arena.move(weights[i], (0, per_layer), kv[half + i], 1)
        times_s.append(time.perf_counter() - start_s)
        for i in range(half):
            kv[half + i].tensor(torch.uint8)[chunk_bytes : (1 + per_layer) * chunk_bytes].fill_(i)
        torch.cuda.synchronize()
        for i in range(half):
            arena.move(kv[half + i], (1, 1 + per_layer), weights[i], 0)
    note_figure(f"remap of 2 GiB in chunks of {chunk_bytes // MIB} MiB", 1e3 * statistics.median(times_s), "ms")
    per_call_s = 1e-4  # what a driver call may take; thousands of small chunks take as many calls
    assert statistics.median(times_s) < per_call_s * half * (per_layer + 2)
    assert arena.check() == ()
    arena.close()


def test_the_device_gets_its_memory_back() -> None:
    torch.zeros(1, device="cuda")
    before, _ = torch.cuda.mem_get_info()
    arena = opened(64, 16 * MIB)
    taken, _ = torch.cuda.mem_get_info()
    region = arena.reserve(1 << 30, "r")
    arena.map(region, 0, 64)
    region.tensor(torch.uint8).fill_(1)
    torch.cuda.synchronize()
    assert before - taken >= 1 << 30
    arena.close()
    assert torch.cuda.mem_get_info()[0] > taken
    del arena, region
    gc.collect()


def test_memory_is_taken_whole_or_not_at_all() -> None:
    torch.zeros(1, device="cuda")
    before, total = torch.cuda.mem_get_info()
    with pytest.raises(ConfigError, match="wants"):
        open_arena(torch.device("cuda"), 2 * total, 64 * MIB)
    assert torch.cuda.mem_get_info()[0] == before


def test_any_thread_can_remap() -> None:
    arena = opened(2)
    region = arena.reserve(2 * CHUNK, "r")
    thread = threading.Thread(target=arena.map, args=(region, 0, 2))
    thread.start()
    thread.join(30)
    region.tensor(torch.uint8).fill_(1)
    torch.cuda.synchronize()
    assert region.mapped == ((0, 2),)
    arena.close()
