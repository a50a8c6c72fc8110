"""Two instances on one GPU that never change their shape: vLLM's own engine, and a request goes on after a death.

It runs on a CPU as well (`device.py`).
"""

import importlib.util
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from tests.gpu.device import DEVICE, IS_CUDA
from tests.gpu.figures import note_figure
from tests.support import ahead_host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(150 if IS_CUDA else 900),
    pytest.mark.skipif(IS_CUDA and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

RUNNER = "vllm.v1.worker.gpu.model_runner" if IS_CUDA else "vllm.v1.worker.cpu_model_runner"  # V2; on a CPU V1
# All else is vLLM's choice: runner, scheduling, compilation and full graphs. Only Triton's attention has float32.
ENGINE: dict[str, Any] = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.1} if IS_CUDA else {}
KINDS = ("greedy", "seeded", "seeded penalties", "minimum length", "logprobs", "grammar", "schema")


@pytest.fixture(scope="module")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Two instances; in the end it is seen which runner computed, and that steps were scheduled ahead."""
    from tests.support.processes import start_instances

    folder = tmp_path_factory.mktemp("ahead")
    environment = {ahead_host.VARIABLE: str(folder), "TRITON_F32_DEFAULT": "ieee"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        found = start_instances(model, [0, 1], module="tests.support.ahead_host", device=DEVICE, engine=ENGINE)
        yield found
        for process in found:
            assert process.stop() == 0
            num_ahead, runner = ahead_host.notes_of(folder, process.process.pid)
            assert num_ahead > 10 and runner == RUNNER, (num_ahead, runner)


@pytest_asyncio.fixture(scope="module")
async def readers(stock: list[Any]) -> AsyncIterator[list[Any]]:
    from tests.support.cut_requests import reading

    async with reading(stock) as found:
        yield found


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_that_is_cut_goes_on_as_it_would_have(readers: list[Any], kind: str) -> None:
    from tests.support.cut_requests import check_cuts

    await check_cuts(*readers, kind, (1, 17, 39))


async def test_time_of_a_token(readers: list[Any]) -> None:
    """Of one request alone, from the first on."""
    from vllm import SamplingParams

    from tests.support.cut_requests import make_request

    took_s, count = [], 200 if IS_CUDA else 20
    for round_ in range(3):
        name = f"alone {round_}"
        asked = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        began_s = time.perf_counter()
        readers[0].link.add(make_request(name, [7] * 20, asked))
        await readers[0].until([name])
        took_s.append((time.perf_counter() - began_s) / count)
        assert len(readers[0].tokens[name]) == count
    note_figure("a token of one request, stock engine, tiny model", 1e3 * statistics.median(took_s), "ms")
