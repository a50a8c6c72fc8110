"""Copies between device and host: how fast, by the length of their runs and by the kind of the host's memory."""

import statistics
import time

import pytest
import torch

from tests.gpu.figures import note_figure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(30),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
BLOCK_BYTES = 64 << 10  # of one block in one layer: 16 tokens of 8 heads of 128, K and V, in bfloat16
TOTAL_BYTES = 256 * MIB


def seconds(host: torch.Tensor, device: torch.Tensor, run_blocks: int, *, to_host: bool) -> float:
    """Median seconds of a copy of all blocks, in runs of so many."""
    stream, times_s = torch.cuda.Stream(), []
    for _ in range(5):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        with torch.cuda.stream(stream):
            for first in range(0, len(host), run_blocks):
                run = slice(first, first + run_blocks)
                if to_host:
                    host[run].copy_(device[run], non_blocking=True)
                else:
                    device[run].copy_(host[run], non_blocking=True)
        stream.synchronize()
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s)


@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("run_blocks", [1, 4, 16, 4096])
def test_bandwidth_by_length_of_runs(run_blocks: int, is_pinned: bool) -> None:
    host = torch.randint(0, 255, (TOTAL_BYTES // BLOCK_BYTES, BLOCK_BYTES), dtype=torch.uint8, pin_memory=is_pinned)
    device = torch.empty_like(host, device="cuda")
    kind = "pinned" if is_pinned else "pageable"
    for to_host in (False, True):
        speed = TOTAL_BYTES / seconds(host, device, run_blocks, to_host=to_host) / 1e9
        note_figure(f"{kind}, runs of {run_blocks} blocks, {'to host' if to_host else 'to device'}", speed, "GB/s")
    assert torch.equal(device.cpu(), host)


def test_a_gather_on_the_device_then_one_copy() -> None:
    """Scattered blocks: gathered on the device first, as `CopyEngine` does with short runs."""
    count = TOTAL_BYTES // BLOCK_BYTES
    host = torch.empty(count, BLOCK_BYTES // 8, dtype=torch.int64, pin_memory=True)
    device = torch.randint(0, 1 << 40, (count, BLOCK_BYTES // 8), device="cuda")
    index = torch.randperm(count, device="cuda")
    times_s = []
    for _ in range(5):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        host.copy_(device.index_select(0, index), non_blocking=True)
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - began_s)
    note_figure("gathered on the device, to host", TOTAL_BYTES / statistics.median(times_s) / 1e9, "GB/s")
    assert torch.equal(host, device[index].cpu())
