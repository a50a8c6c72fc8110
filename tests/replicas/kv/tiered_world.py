"""Requests over tiers without a model: each step stamps the tokens that it writes, and reads what all before wrote."""

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from pengserve.replicas.kv.host_tier import HostTier
from pengserve.replicas.kv.placement import Use
from pengserve.replicas.kv.pool import DevicePool, seen_twice
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.memory.arena.cpu import CpuBackend

BLOCK_SIZE = 4  # tokens
TOKEN_BYTES = 1024  # of one token in one layer; a block is a page


@dataclass
class FakeRequest:
    """Tokens, and the logical blocks that hold their KV."""

    name: int
    blocks: list[int] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)  # by block: the request that wrote it
    num_tokens: int = 0


class TieredWorld:
    """A block pool like vLLM's, requests, and the check of every byte that a step reads."""

    def __init__(self, num_layers: int, device_blocks: int, host_blocks: int, reserved: int, link: float = 0.0) -> None:
        self.num_layers = num_layers
        block_bytes = BLOCK_SIZE * TOKEN_BYTES
        memory = seen_twice(CpuBackend(huge_pages=False), num_layers * device_blocks * block_bytes)
        self.pool = DevicePool(memory, num_layers, device_blocks, block_bytes)
        self.host = HostTier(num_layers, host_blocks, BLOCK_SIZE * TOKEN_BYTES)
        self.num_blocks = device_blocks + host_blocks - reserved
        self.tiers = TieredKv(
            self.pool, self.host, num_blocks=self.num_blocks, block_size=BLOCK_SIZE, link_bytes_per_s=link
        )
        self.tiers.watch_uses(self.uses)
        self.free = list(range(1, self.num_blocks))
        self.requests: list[FakeRequest] = []
        self.cached: dict[int, int] = {}  # blocks that no request has and that hold a full block, and who wrote it
        self.layers = [self.pool.layer(layer).view(-1, BLOCK_SIZE, TOKEN_BYTES) for layer in range(num_layers)]
        self._name = 0

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
        starts = np.array([request.num_tokens for request, _ in work])
        for request, count in work:
            stop = -(-(request.num_tokens + count) // BLOCK_SIZE)
            while len(request.blocks) < stop:
                request.blocks.append(block := self.free.pop(0))
                request.writers.append(request.name)
                self.cached.pop(block, None)
        counts = np.array([len(request.blocks) for request, _ in work])
        tables = np.zeros((len(work), counts.max() + 3), dtype=np.int32)
        for row, (request, _) in enumerate(work):
            tables[row, : len(request.blocks)] = request.blocks
        step = self.tiers.begin_step(tables, counts, starts)
        index = np.arange(self.num_blocks)[None] if step is None else step.index
        waits = step is not None and bool(step.waits)
        for layer in range(self.num_layers):
            row = index[layer if len(index) > 1 else 0]
            for request, count in work:  # the KV of new tokens is written before the layer waits
                for token in range(request.num_tokens, request.num_tokens + count):
                    self._place(layer, row, request, token)[:] = self._stamp(layer, request, token)
            if waits:
                self.tiers.wait_layer(layer)
            for request, count in work:
                for token in range(request.num_tokens + count):
                    found = self._place(layer, row, request, token)
                    assert torch.equal(found, self._stamp(layer, request, token)), (layer, request.name, token)
            if waits:
                self.tiers.read_layer(layer)
        if waits:
            self.tiers.end_step()
        for request, count in work:
            request.num_tokens += count
        assert self.tiers.check() == ()

    def _place(self, layer: int, row: np.ndarray, request: FakeRequest, token: int) -> torch.Tensor:
        block = request.blocks[token // BLOCK_SIZE]
        return self.layers[layer][int(row[block]), token % BLOCK_SIZE, :8]

    def _stamp(self, layer: int, request: FakeRequest, token: int) -> torch.Tensor:
        writer, place = request.writers[token // BLOCK_SIZE], token % BLOCK_SIZE
        block = request.blocks[token // BLOCK_SIZE]
        digits = [layer, writer % 256, writer // 256, block % 256, block // 256, place, 2, 3]
        return torch.tensor(digits, dtype=torch.uint8)

    def random_step(self, rng: random.Random) -> None:
        """A new request, an end, a swap beside the steps, and a step of some requests."""
        if len(self.requests) < 6 and rng.random() < 0.5:
            self.begin_with_prefix(rng)
        if self.requests and rng.random() < 0.1:
            self.end(rng.choice(self.requests))
        idle = [request for request in self.requests if request.blocks]
        if idle and rng.random() < 0.3:
            blocks = np.array(rng.choice(idle).blocks)
            if rng.random() < 0.3:
                request = rng.choice(idle)
                full = request.blocks[: request.num_tokens // BLOCK_SIZE]
                if full:
                    self.tiers.place(
                        np.array(full), rng.sample(range(self.num_layers), rng.randint(0, self.num_layers))
                    )
            elif rng.random() < 0.5:
                self.tiers.bring(blocks, np.zeros(0, dtype=np.int64))
            else:
                self.tiers.write_behind(blocks)
        work: list[tuple[FakeRequest, int]] = []
        for request in rng.sample(self.requests, len(self.requests)):
            more = [*work, (request, rng.choice([1, 1, 2, 5, 9]))]
            if self.can_step(more):
                work = more
        if work:
            self.step(work)
        elif self.requests:
            self.end(self.requests[-1])

    def close(self) -> None:
        self.tiers.close()
