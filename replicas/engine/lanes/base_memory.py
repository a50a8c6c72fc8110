"""The base model's weights and KV in an arena, so that memory can change hands between them (KunServe section 4.1).

vLLM loads the model as it always does; then the parameters of each decoder layer move into that layer's range, and KV
is bound there instead of being allocated. What belongs to no layer (embeddings, final norm, head) stays where it was.
On CUDA the arena grows layer by layer, and torch gives back what it had, so that the device holds the weights and one
layer more at most; KV gets the rest at last.

A copy of all layers' bytes is kept in an unlinked file, so that a dropped layer can come back when no peer is left.
"""

import contextlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from pengserve.planners.layer_sizes import LayerSizes
from pengserve.planners.stages import stage_layers
from pengserve.planners.types.errors import ConfigError, UnsupportedShapeError
from pengserve.planners.types.units import format_bytes
from pengserve.replicas.engine.lanes.shared_model import pack_linears
from pengserve.replicas.memory.arena.open import open_arena
from pengserve.replicas.memory.layers import LayerMemory

OPTIONS = "pengserve_memory"
"""Key of vLLM's `additional_config` under which a `MemoryOptions` travels to the worker."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ALIGNMENT = 64  # bytes; of each tensor within its layer's range


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """The memory that an instance may use, and the unit in which it moves between weights and KV."""

    memory_bytes: int  # below 0: what the device has free
    chunk_bytes: int
    max_stages: int
    is_gradual: bool = False  # the device's memory is taken layer by layer: it does not hold weights and arena
    communicator_bytes: int = 0  # of the device, that groups' communicators will need beside it
    is_packed: bool = False  # linear weights lie as oneDNN reads them; no lane may view parts of them

    @property
    def is_auto(self) -> bool:
        """Whether the instance takes what it finds free."""
        return self.memory_bytes < 0


@dataclass(frozen=True, slots=True)
class _Place:
    """One parameter within its layer's range."""

    parameter: nn.Parameter
    start: int


class BaseMemory:
    """Weights and KV of one model, and where each layer's parameters are."""

    def __init__(self, model: nn.Module, device: torch.device, options: MemoryOptions, block_bytes: int) -> None:
        """Moves the layers' parameters into an arena of what `options` leave beside the rest of the model.

        Args:
            block_bytes: of one KV block in one layer.

        Raises:
            ConfigError: the memory does not hold the model and some KV.
            UnsupportedShapeError: the model's parameters do not belong to numbered layers.
        """
        by_layer = _parameters_by_layer(model)
        places = [_places(parameters) for parameters in by_layer]
        in_layers = {id(place.parameter) for layer in places for place in layer}
        self.rest_bytes = sum(p.nbytes for p in _unique(model.parameters()) if id(p) not in in_layers)
        num_chunks = (options.memory_bytes - self.rest_bytes) // options.chunk_bytes
        if num_chunks < 1:
            raise ConfigError(
                f"memory_bytes of {format_bytes(options.memory_bytes)} do not hold the {format_bytes(self.rest_bytes)} "
                "that are outside the model's layers; raise it"
            )
        sizes = LayerSizes(
            num_chunks=num_chunks,
            chunk_bytes=options.chunk_bytes,
            weight_bytes=tuple(layer[-1].start + layer[-1].parameter.nbytes for layer in places),
            block_bytes=block_bytes,
        )
        num_at_first = 1 if options.is_gradual else num_chunks
        with _as_unsupported():
            arena = open_arena(device, num_at_first * options.chunk_bytes, options.chunk_bytes)
        stages = range(1, min(options.max_stages, sizes.num_layers) + 1)
        fewest = min(stop - first for n in stages for first, stop in stage_layers(sizes.num_layers, n))
        self.layers = LayerMemory(arena, sizes, fewest, is_gradual=options.is_gradual)
        self._arena, self._device = arena, device
        self._spare = tempfile.TemporaryFile(prefix="pengserve-weights-")  # noqa: SIM115
        self._offsets: list[int] = []
        self._filled: set[int] = set()  # layers whose mapped weights are valid
        try:
            with _as_unsupported():
                for layer, parameters in enumerate(places):
                    self._take(layer, parameters)
                self.layers.fill_up()
        except BaseException:
            self._leave(places, device)
            raise
        # A checksum of the order in which weights are packed. Members with different orders must not exchange weights.
        self.weight_order = pack_linears(model) if options.is_packed else 0
        for layer in range(sizes.num_layers):
            self._write_spare(layer)

    def _take(self, layer: int, places: list[_Place]) -> None:
        self.layers.grow_for(layer)
        memory = self.layers.weights(layer)
        for place in places:
            parameter, start = place.parameter, place.start
            home = memory[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            home.copy_(parameter.data)
            parameter.data = home
        self._filled.add(layer)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what torch had of this layer is the arena's for the next ones

    def _leave(self, places: Sequence[Sequence[_Place]], device: torch.device) -> None:
        """Gives parameters memory of their own again, and the arena's memory back to the system.

        The parameters go by way of the host, since the device may not hold both.
        """
        taken = [place.parameter for layer in places for place in layer]
        for parameter in taken:
            parameter.data = torch.empty_like(parameter.data, device="cpu").copy_(parameter.data)
        self.close()
        for parameter in taken:
            parameter.data = parameter.data.to(device)

    def drop_weights(self, layer: int) -> None:
        """Frees the memory of a layer's weights. The base model must not run until they are back."""
        self._filled.discard(layer)
        self.layers.drop_weights(layer)

    def fill_weights(self, layer: int) -> None:
        """Maps a layer's weights and fills them from this member's own copy.

        Raises:
            StepError: there is no memory for them.
        """
        self.layers.bring_weights(layer)
        self.layers.weights(layer).copy_(self._read_spare(layer))
        self._filled.add(layer)

    def note_filled(self, layer: int) -> None:
        """Notes that the caller has written the right weights into a layer's mapped memory."""
        self._filled.add(layer)

    def make_whole(self) -> None:
        """Goes back to what `dp` needs, from any state: all weights, and KV of `base_blocks` in every layer.

        KV that stays mapped keeps its bytes, but no lane may take them for valid KV.
        """
        layers = self.layers
        everything = range(layers.sizes.num_layers)
        for layer in everything:
            layers.resize_kv(layer, min(layers.num_blocks(layer), layers.base_blocks))
        for layer in everything:
            if layer not in self._filled:
                self.fill_weights(layer)
            layers.resize_kv(layer, layers.base_blocks)

    def _write_spare(self, layer: int) -> None:
        self._offsets.append(self._spare.tell())
        self._spare.write(self.layers.weights(layer).cpu().numpy().tobytes())
        self._spare.flush()

    def _read_spare(self, layer: int) -> torch.Tensor:
        self._spare.seek(self._offsets[layer])
        return torch.from_numpy(np.fromfile(self._spare, dtype=np.uint8, count=self.layers.sizes.weight_bytes[layer]))

    def close(self) -> None:
        """Gives all memory back."""
        self._arena.close()
        self._spare.close()


@contextlib.contextmanager
def _as_unsupported() -> Iterator[None]:
    """Around what the device may refuse: vLLM's own memory serves `dp` as well."""
    try:
        yield
    except ConfigError as error:
        raise UnsupportedShapeError(str(error)) from error


def layer_of(name: str) -> int:
    """Number of the decoder layer that a parameter's or attention layer's name belongs to."""
    found = _LAYER.search(name)
    if found is None:
        raise UnsupportedShapeError(f"{name} belongs to no numbered layer; leave max_stages at 1 for this model")
    return int(found[1])


def block_bytes_of(runner: Any) -> int:
    """Bytes of one KV block in one layer.

    Raises:
        UnsupportedShapeError: the model keeps KV of several kinds.
    """
    specs = runner.get_kv_cache_spec()
    pages = {spec.page_size_bytes for spec in specs.values()}
    if {type(spec).__name__ for spec in specs.values()} != {"FullAttentionSpec"} or len(pages) != 1:
        raise UnsupportedShapeError("only full attention can share memory with weights; leave max_stages at 1")
    page: int = pages.pop()
    return page


def _parameters_by_layer(model: nn.Module) -> list[list[nn.Parameter]]:
    by_layer: dict[int, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if _LAYER.search(name):
            by_layer.setdefault(layer_of(name), []).append(parameter)
    if sorted(by_layer) != list(range(len(by_layer))) or not by_layer:
        raise UnsupportedShapeError("this model's layers are not numbered from 0 on; leave max_stages at 1")
    return [by_layer[layer] for layer in range(len(by_layer))]


def _places(parameters: Iterable[nn.Parameter]) -> list[_Place]:
    places, start = [], 0
    for parameter in parameters:
        places.append(_Place(parameter, start))
        start += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places


def _unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list({id(parameter): parameter for parameter in parameters}.values())
