"""Requests over tiers without a model: each step stamps the tokens that it writes, and reads what all before wrote."""

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from pengserve.replicas.kv.host_tier import HostTier
from pengserve.replicas.kv.placement import Use
from pengserve.replicas.kv.pool import DevicePool
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.memory.arena.cpu import CpuBackend

BLOCK_SIZE = 4  # tokens
TOKEN_BYTES = 1024  # of one token in one layer; a block is a page


@dataclass
class FakeRequest:
    """Tokens, and the logical blocks that hold their KV."""

    name: int
    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0


class TieredWorld:
    """A block pool like vLLM's, requests, and the check of every byte that a step reads."""

    def __init__(self, num_layers: int, device_blocks: int, host_blocks: int, reserved: int, link: float = 0.0) -> None:
        self.num_layers = num_layers
        self.pool = DevicePool(CpuBackend(huge_pages=False), num_layers, device_blocks, BLOCK_SIZE * TOKEN_BYTES)
        self.host = HostTier(num_layers, host_blocks, BLOCK_SIZE * TOKEN_BYTES)
        self.num_blocks = device_blocks + host_blocks - reserved
        self.tiers = TieredKv(
            self.pool, self.host, num_blocks=self.num_blocks, block_size=BLOCK_SIZE, link_bytes_per_s=link
        )
        self.tiers.uses = self.uses
        self.free = list(range(1, self.num_blocks))
        self.requests: list[FakeRequest] = []
        self.layers = [self.pool.layer(layer).view(-1, BLOCK_SIZE, TOKEN_BYTES) for layer in range(num_layers)]
        self._name = 0

    def uses(self) -> np.ndarray:
        found = np.full(self.num_blocks, Use.DEAD, dtype=np.uint8)
        found[[block for request in self.requests for block in request.blocks]] = Use.HELD
        return found

    def begin(self) -> FakeRequest:
        self._name += 1
        self.requests.append(request := FakeRequest(self._name))
        return request

    def end(self, request: FakeRequest) -> None:
        self.requests.remove(request)
        self.free = request.blocks + self.free if self._name % 2 else self.free + request.blocks

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
                request.blocks.append(self.free.pop(0))
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
        digits = [layer, request.name % 256, request.name // 256, token % 256, token // 256, 1, 2, 3]
        return torch.tensor(digits, dtype=torch.uint8)

    def random_step(self, rng: random.Random) -> None:
        """A new request, an end, a swap beside the steps, and a step of some requests."""
        if len(self.requests) < 6 and rng.random() < 0.5:
            self.begin()
        if self.requests and rng.random() < 0.1:
            self.end(rng.choice(self.requests))
        idle = [request for request in self.requests if request.num_tokens]
        if idle and rng.random() < 0.3:
            blocks = np.array(rng.choice(idle).blocks)
            if rng.random() < 0.5:
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
