"""Laws of moving a model's weights into the arena: what is held meanwhile, and what a refusal leaves."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
from pengserve.planners.types.errors import ConfigError, UnsupportedShapeError
from pengserve.replicas.engine.lanes.base_memory import BaseMemory, MemoryOptions
from pengserve.replicas.memory.arena.cpu import CpuBackend

pytestmark = pytest.mark.slow  # it imports vLLM

CHUNK, BLOCK = 64 << 10, 16 << 10
CPU = torch.device("cpu")
NUM_LAYERS, WIDTH = 6, 256


class Model(nn.Module):
    """Layers of 512 KiB between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(NUM_LAYERS)
        )
        self.head = nn.Linear(WIDTH, 512, bias=False)
        self.requires_grad_(False)


class Device:
    """How many bytes parameters and arena have at once, whenever the arena takes memory."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._homes = {parameter.data_ptr() for parameter in self._parameters}
        self.arena_bytes = self.peak_bytes = 0
        self.refuses_from_bytes = 1 << 40

    def take(self, num_bytes: int) -> None:
        """Called before the arena has them."""
        if self.arena_bytes + num_bytes > self.refuses_from_bytes:
            raise ConfigError("the device has no more")
        self.arena_bytes += num_bytes
        loaded = sum(parameter.nbytes for parameter in self._parameters if parameter.data_ptr() in self._homes)
        self.peak_bytes = max(self.peak_bytes, self.arena_bytes + loaded)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def device(model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found, create = Device(model), CpuBackend.create

    def take(backend: CpuBackend, num_chunks: int, chunk_bytes: int) -> None:
        found.take(num_chunks * chunk_bytes)
        create(backend, num_chunks, chunk_bytes)

    monkeypatch.setattr(CpuBackend, "create", take)
    yield found


def memory_of(model: nn.Module, memory_bytes: int, **changes: Any) -> BaseMemory:
    options = MemoryOptions(memory_bytes=memory_bytes, chunk_bytes=CHUNK, max_stages=2, **changes)
    return BaseMemory(model, CPU, options, BLOCK)


def bytes_of(model: nn.Module) -> tuple[int, int]:
    """Of all parameters, and of one layer's."""
    return sum(p.nbytes for p in model.parameters()), sum(p.nbytes for p in model.layers[0].parameters())  # type: ignore[index]


def test_no_more_than_the_weights_and_one_layer_is_held_while_they_move(model: Model, device: Device) -> None:
    weights, layer = bytes_of(model)
    memory_bytes = weights + 2 * NUM_LAYERS * CHUNK
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    memory = memory_of(model, memory_bytes, is_gradual=True)
    assert weights < device.peak_bytes <= max(memory_bytes, weights + layer + CHUNK)
    assert memory.layers.is_whole() and memory.layers.check_chunks() == ()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    memory.close()


@pytest.mark.parametrize("is_gradual", [True, False])
def test_either_way_there_are_as_many_blocks(model: Model, is_gradual: bool) -> None:
    memory = memory_of(model, 8 << 20, is_gradual=is_gradual)
    rest = sum(parameter.nbytes for parameter in (model.embed.weight, model.head.weight))
    assert memory.layers.sizes.num_chunks == ((8 << 20) - rest) // CHUNK
    assert memory.layers.num_blocks(NUM_LAYERS - 1) == memory.layers.base_blocks > 2
    memory.close()


def test_what_the_device_refuses_midway_leaves_the_weights_as_they_were(model: Model, device: Device) -> None:
    """`dp` then serves from vLLM's own memory."""
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    device.refuses_from_bytes = 3 * bytes_of(model)[1]
    with pytest.raises(UnsupportedShapeError, match="the device has no more"):
        memory_of(model, 8 << 20, is_gradual=True)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
