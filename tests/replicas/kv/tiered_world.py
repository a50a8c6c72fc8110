"""Requests over tiers without a model: each step stamps the tokens that it writes, and reads what all before wrote.

The batch is kept as vLLM's runner keeps it, and its table of blocks is shown as to vLLM's kernels.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from pengserve.replicas.engine.tiers.shown_table import ShownTable
from pengserve.replicas.kv.host_tier import HostTier
from pengserve.replicas.kv.placement import Use
from pengserve.replicas.kv.pool import DevicePool, seen_twice
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.memory.arena.backend import Backend
from pengserve.replicas.memory.arena.cpu import CpuBackend

BLOCK_SIZE = 4  # tokens
MAX_REQUESTS = 8  # in the batch
TOKEN_BYTES = 1024  # of one token in one layer; a block is a page of a CPU


@dataclass
class FakeRequest:
    """Tokens, and the logical blocks that hold their KV."""

    name: int
    blocks: list[int] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)  # by block: the request that wrote it
    num_tokens: int = 0


class TieredWorld:
    """A block pool like vLLM's, requests, and the check of every byte that a step reads."""

    def __init__(
        self,
        num_layers: int,
        device_blocks: int,
        host_blocks: int,
        reserved: int,
        link: float = 0.0,
        *,
        backend: Backend | None = None,
        token_bytes: int = TOKEN_BYTES,
    ) -> None:
        self.num_layers = num_layers
        block_bytes = BLOCK_SIZE * token_bytes
        memory = seen_twice(backend or CpuBackend(huge_pages=False), num_layers * device_blocks * block_bytes)
        self.pool = DevicePool(memory, num_layers, device_blocks, block_bytes)
        self.host = HostTier(num_layers, host_blocks, block_bytes, is_pinned=memory.is_cuda)
        self.num_blocks = device_blocks + host_blocks - reserved
        self.tiers = TieredKv(
            self.pool, self.host, num_blocks=self.num_blocks, block_size=BLOCK_SIZE, link_bytes_per_s=link
        )
        self.tiers.watch_uses(self.uses)
        self.free = list(range(1, self.num_blocks))
        self.requests: list[FakeRequest] = []
        self.cached: dict[int, int] = {}  # blocks that no request has and that hold a full block, and who wrote it
        self.layers = [self.pool.layer(layer).view(-1, BLOCK_SIZE, token_bytes) for layer in range(num_layers)]
        self._name = 0
        self._batch = _batch(self.num_blocks, memory.device)
        self.shown = ShownTable(self._batch, self.tiers, BLOCK_SIZE)

    def uses(self) -> np.ndarray:
        found = np.full(self.num_blocks, Use.DEAD, dtype=np.uint8)
        found[list(self.cached)] = Use.CACHED
        found[[block for request in self.requests for block in request.blocks]] = Use.HELD
        return found

    def begin(self) -> FakeRequest:
        self._name += 1
        self.requests.append(request := FakeRequest(self._name))
        return request

    def begin_with_prefix(self, rng: random.Random) -> None:
        """A request that shares full blocks with one that runs, or finds those of one that has ended."""
        request = self.begin()
        if self.requests[:-1] and rng.random() < 0.5:
            other = rng.choice(self.requests[:-1])
            count = rng.randint(0, other.num_tokens // BLOCK_SIZE)
            request.blocks, request.writers = other.blocks[:count], other.writers[:count]
        elif self.cached:
            writer = rng.choice(list(self.cached.values()))
            request.blocks = [block for block, name in self.cached.items() if name == writer]
            request.writers = [writer] * len(request.blocks)
            for block in request.blocks:
                del self.cached[block]
                self.free.remove(block)
        request.num_tokens = len(request.blocks) * BLOCK_SIZE

    def end(self, request: FakeRequest) -> None:
        """Its full blocks stay as cached prefixes, the others are dead; each as soon as no other request has it."""
        self.requests.remove(request)
        held = {block for other in self.requests for block in other.blocks}
        full = request.num_tokens // BLOCK_SIZE
        for index, block in enumerate(request.blocks):
            if block in held:
                continue
            if index < full and self._name % 3:
                self.cached[block] = request.writers[index]
                self.free.append(block)
            else:
                self.free.insert(0, block)

    def can_step(self, work: list[tuple[FakeRequest, int]]) -> bool:
        """Whether the pool has blocks, and the device cells, for so many tokens of each."""
        new = sum(-(-(r.num_tokens + n) // BLOCK_SIZE) - len(r.blocks) for r, n in work)
        if new > len(self.free):
            return False
        total = sum(-(-(r.num_tokens + n) // BLOCK_SIZE) for r, n in work)
        written = sum(-(-n // BLOCK_SIZE) + 1 for _, n in work)
        room = (self.pool.num_blocks - 1) * self.num_layers
        stuck = max(0, self.num_blocks - 1 - self.host.num_rows)
        return self.num_layers * max(stuck, written) + total <= room

    def step(self, work: list[tuple[FakeRequest, int]]) -> None:
        """Computes so many tokens of each request, layer by layer, and checks all that it reads."""
        for request, count in work:
            stop = -(-(request.num_tokens + count) // BLOCK_SIZE)
            while len(request.blocks) < stop:
                request.blocks.append(block := self.free.pop(0))
                request.writers.append(request.name)
                self.cached.pop(block, None)
        self._commit(work)
        step = self.shown.step
        for layer in range(self.num_layers):
            for row, (request, count) in enumerate(work):  # new tokens' KV is written before the layer waits
                for token in range(request.num_tokens, request.num_tokens + count):
                    self._place(layer, row, request, token)[:] = self._stamp(layer, request, token)
            if step is not None and step.waits:
                self.tiers.wait_layer(layer)
            for row, (request, count) in enumerate(work):
                for token in range(request.num_tokens + count):
                    found = self._place(layer, row, request, token)
                    assert torch.equal(found, self._stamp(layer, request, token)), (layer, request.name, token)
            if step is not None and step.waits:
                self.tiers.read_layer(layer)
        if step is not None and step.waits:
            self.tiers.end_step()
        for request, count in work:
            request.num_tokens += count
        assert self.tiers.check() == ()

    def _commit(self, work: list[tuple[FakeRequest, int]]) -> None:
        """As vLLM's runner, which keeps its rows as long as the requests stay the same."""
        ids, before = [str(request.name) for request, _ in work], self._batch.req_ids
        table = self._batch.block_table[0].block_table.np
        for row, (request, _) in enumerate(work):
            table[row, : len(request.blocks)] = request.blocks
            self._batch.num_computed_tokens_cpu[row] = request.num_tokens
        self._batch.req_ids = ids
        tokens = {str(request.name): count for request, count in work}
        is_decode = set(tokens.values()) == {1} and set(ids) <= set(before)
        self.shown.expect(tokens, is_decode=is_decode)
        self._batch.block_table.commit_block_table(len(work))

    def _place(self, layer: int, row: int, request: FakeRequest, token: int) -> torch.Tensor:
        column, step = token // BLOCK_SIZE, self.shown.step
        place = self._batch.block_table[0].block_table.gpu[row, column]
        if step is not None:
            assert int(place) == request.blocks[column]
            place = step.index[layer, request.blocks[column]]
        return self.layers[layer][int(place), token % BLOCK_SIZE, :8]

    def _stamp(self, layer: int, request: FakeRequest, token: int) -> torch.Tensor:
        writer, place = request.writers[token // BLOCK_SIZE], token % BLOCK_SIZE
        block = request.blocks[token // BLOCK_SIZE]
        digits = [layer, writer % 256, writer // 256, block % 256, block // 256, place, 2, 3]
        return torch.tensor(digits, dtype=torch.uint8, device=self.pool.cells.device)

    def random_step(self, rng: random.Random) -> None:
        """A new request, an end, a swap beside the steps, and a step of some requests."""
        if len(self.requests) < 6 and rng.random() < 0.5:
            self.begin_with_prefix(rng)
        if self.requests and rng.random() < 0.1:
            self.end(rng.choice(self.requests))
        if rng.random() < 0.3:
            self.move_one(rng)
        work: list[tuple[FakeRequest, int]] = []
        for request in rng.sample(self.requests, len(self.requests)):
            more = [*work, (request, rng.choice([1, 1, 2, 5, 9]))]
            if self.can_step(more):
                work = more
        if work:
            self.step(work)
        elif self.requests:
            self.end(self.requests[-1])

    def move_one(self, rng: random.Random) -> None:
        """KV of a request comes to the device, or is written to the host, or is to be there in some layers."""
        idle = [request for request in self.requests if request.blocks]
        if not idle:
            return
        blocks = np.array(rng.choice(idle).blocks)
        if rng.random() < 0.3:
            request = rng.choice(idle)
            full = request.blocks[: request.num_tokens // BLOCK_SIZE]
            if full:
                self.tiers.place(np.array(full), rng.sample(range(self.num_layers), rng.randint(0, self.num_layers)))
        elif rng.random() < 0.5:
            self.tiers.bring(blocks, np.zeros(0, dtype=np.int64))
        else:
            self.tiers.write_behind(blocks)

    def close(self) -> None:
        self.tiers.close()


class _Tables(list[SimpleNamespace]):
    """vLLM's tables, of one KV group."""

    commit_block_table: Callable[[int], None]


def _batch(num_blocks: int, device: torch.device) -> SimpleNamespace:
    """As much of vLLM's `InputBatch` as there must be. On a CPU it has one tensor for both of its tables."""
    cpu = torch.zeros((MAX_REQUESTS, num_blocks), dtype=torch.int32)
    gpu = cpu if device.type == "cpu" else cpu.to(device)
    return SimpleNamespace(
        req_ids=[],
        num_computed_tokens_cpu=np.zeros(MAX_REQUESTS, dtype=np.int32),
        block_table=_Tables([SimpleNamespace(block_table=SimpleNamespace(np=cpu.numpy(), cpu=cpu, gpu=gpu))]),
    )
