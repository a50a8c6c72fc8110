"""Laws of `memory_bytes: auto`: weights and KV share what is left beside activations and the graphs of all shapes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from pengserve.planners.types.errors import ConfigError
from pengserve.replicas.engine import worker as module
from pengserve.replicas.engine.lanes.base_memory import OPTIONS, MemoryOptions
from pengserve.replicas.engine.worker import CPU_SHARE, SHAPES, LaneWorkerMixin

pytestmark = pytest.mark.slow  # it imports vLLM
WEIGHTS, GRAPHS, GROUPS = 600, 50, 8


class VllmWorker:
    """Finds so much free after a run of the model over dummy tokens."""

    free = 1000
    cudagraph_memory_estimate = GRAPHS

    def determine_available_memory(self) -> int:
        return self.free


class Worker(LaneWorkerMixin, VllmWorker):
    """With a model of `WEIGHTS` bytes, which cannot share memory where `fails`."""

    def __init__(self, device: str, num_shapes: int = 2, world_size: int = 1, fails: bool = False) -> None:
        memory = {"memory_bytes": -1, "chunk_bytes": 1, "max_stages": 2, "communicator_bytes": GROUPS}
        self.vllm_config: Any = SimpleNamespace(
            additional_config={OPTIONS: memory, SHAPES: num_shapes},
            parallel_config=SimpleNamespace(world_size=world_size),
        )
        self.device, self.fails = torch.device(device), fails
        self.asked: list[int] = []

    def weight_bytes(self) -> int:
        return WEIGHTS

    def _share_memory(self, options: MemoryOptions) -> None:
        self.asked.append(options.memory_bytes)
        if not self.fails:
            sizes = SimpleNamespace(block_bytes=1, num_layers=4)
            layers = SimpleNamespace(base_blocks=(options.memory_bytes - WEIGHTS) // 4, sizes=sizes)
            self.memory: Any = SimpleNamespace(layers=layers)


def test_on_cuda_vllm_looks_and_each_further_shape_has_graphs_and_communicators() -> None:
    worker = Worker("cuda:0")
    assert worker.determine_available_memory() == 1000 - 2 * GRAPHS - GROUPS
    assert worker.asked == [WEIGHTS + 1000 - 2 * GRAPHS - GROUPS]


def test_on_a_cpu_it_is_a_share_of_what_is_free_for_all_workers_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 4000)
    assert Worker("cpu").determine_available_memory() == CPU_SHARE * 4000
    assert Worker("cpu", world_size=2).determine_available_memory() == CPU_SHARE * 2000


def test_where_memory_cannot_be_shared_kv_gets_as_much() -> None:
    worker = Worker("cuda:0", fails=True)
    assert worker.determine_available_memory() == 1000 - 2 * GRAPHS - GROUPS and worker.memory is None


def test_a_model_that_leaves_nothing_is_told_how_much_is_missing() -> None:
    worker = Worker("cuda:0")
    worker.free = -(3 << 20) + 2 * GRAPHS + GROUPS  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"3\.0 MiB are missing.*engine\.gpu_memory_utilization"):
        worker.determine_available_memory()
    assert worker.asked == []
