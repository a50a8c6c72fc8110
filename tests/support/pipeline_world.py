"""A pipeline of two stages with a host tier each: vLLM's scheduler, the lanes' own code, and no model.

A follower runs a microbatch at some time between its beginning and the leader's turn; the leader when it comes back.
Each checks, in its layers, that the KV of all tokens before a microbatch's is where the microbatch reads it.
"""

import random
from collections import Counter, deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from pengserve.replicas.engine.groups.pp_lane import PpLane
from pengserve.replicas.engine.groups.step_message import StepCodec
from pengserve.replicas.engine.lanes.lane_totals import LaneTotals
from pengserve.replicas.engine.scheduling.departures import Departures
from pengserve.replicas.engine.scheduling.microbatches import Microbatches, chunks_of
from pengserve.replicas.engine.tiers.lane_tiers import blocks_begun
from pengserve.replicas.engine.tiers.stage_tiers import PipelineSizes
from pengserve.replicas.engine.vllm_seam import ModelRunnerOutput, Request, get_request_block_hasher
from pengserve.replicas.kv.table import CellTable
from tests.replicas.kv.tiered_world import BLOCK_SIZE, TOKEN_BYTES, TieredWorld
from tests.support.vllm_schedulers import capacity_of, scheduler_handle

NUM_STAGES, STEP_TOKENS = 2, 32


def sizes_of(depth: int) -> PipelineSizes:
    """Of two stages of so many layers, and requests of at most 40 blocks: one layer of these fits on a device."""
    longest, device_blocks = 40, 25 if depth > 1 else 43
    return PipelineSizes(
        stages=((0, depth), (depth, 2 * depth)),
        device_blocks=(device_blocks,) * NUM_STAGES,
        per_row=1,
        longest_blocks=longest,
        reserved_blocks=min(1 + -(-longest // depth), device_blocks - 1),
    )


class Read(NamedTuple):
    """What a microbatch does with a request: its tokens `[start, stop)` are computed."""

    request: Request
    blocks: list[int]
    start: int
    stop: int


class Stage(PpLane):
    """A member, without a model."""

    def __init__(self, stage: int, host_blocks: int, link_bytes_per_s: float, sizes: PipelineSizes) -> None:
        self.stage, self.stages, self.layers = stage, sizes.stages, sizes.stages[stage]
        self.sizes, self._codec, self._handle = sizes, StepCodec(), None
        self._totals = LaneTotals(departures=Departures())
        self._host_rows = host_blocks
        self.world = TieredWorld(self.layers[1] - self.layers[0], sizes.smallest, host_blocks, 0, link_bytes_per_s)
        self.tiers: Any = SimpleNamespace(kv=self.world.tiers, sizes=sizes)
        self.table = CellTable(self.world.num_blocks)
        # Each member has the lane's blocks in another order.
        ids, places = list(range(1, self.world.num_blocks)), list(range(1, self.world.num_blocks))
        random.Random(stage).shuffle(places)
        self.table.lease(ids, places)
        self.group: Any = SimpleNamespace(world_size=NUM_STAGES)
        self._known, self._forgotten, self._told_uses, self._lane_tiers = [], [], None, None
        self._in_flight = deque()
        self._slo_gate = self._slo_placement = None
        self.work: deque[list[Read]] = deque()  # of the microbatches that it has still to run

    def adopt(self, request: Request) -> None:
        """There is no runner."""

    def forget(self, request_ids: Any) -> None:
        """There is none."""

    def _execute(self, microbatch: Any, grammar: Any = None) -> Any:
        reads = self.work.popleft()
        output = self._placed(microbatch.output)
        if self._told_uses is not None:
            self._told_uses.hold(blocks_begun(output))
        if reads:
            self._compute(reads)
        assert self.world.tiers.check() == ()
        return reads

    def _compute(self, reads: Sequence[Read]) -> None:
        kv, size = self.world.tiers, BLOCK_SIZE
        stops = np.array([read.stop for read in reads])
        counts = -(-stops // size)
        tables = np.zeros((len(reads), int(counts.max())), dtype=np.int64)
        for row, read in enumerate(reads):
            places = self.table.physical(read.blocks)[: counts[row]]
            tables[row, : len(places)] = places
        kv.settle()
        step = kv.begin_step(tables, counts, np.array([read.start for read in reads]))
        for layer in range(kv.pool.num_layers):
            index = None if step is None else step.index[layer if step.is_layered else 0]
            self._write(layer, reads, tables, index)
            if step is not None and step.waits:
                kv.wait_layer(layer)
            self._check(layer, reads, tables, index)
            if step is not None and step.waits:
                kv.read_layer(layer)
        if step is not None and step.waits:
            kv.end_step()

    def _cells(self, layer: int, table: np.ndarray, index: np.ndarray | None) -> torch.Tensor:
        places = table if index is None else index[table]
        found: torch.Tensor = self.world.pool.layer(layer)[torch.from_numpy(places.astype(np.int64))]
        return found.view(-1, TOKEN_BYTES)[:, 0]

    def _write(self, layer: int, reads: Sequence[Read], tables: np.ndarray, index: np.ndarray | None) -> None:
        cells = self.world.pool.layer(layer).view(-1, BLOCK_SIZE, TOKEN_BYTES)
        for row, read in enumerate(reads):
            for token in range(read.start, read.stop):
                block = tables[row, token // BLOCK_SIZE]
                place = int(block if index is None else index[block])
                assert place, "what is written has a place"
                cells[place, token % BLOCK_SIZE] = self._stamp(read.request, layer, token)

    def _check(self, layer: int, reads: Sequence[Read], tables: np.ndarray, index: np.ndarray | None) -> None:
        for row, read in enumerate(reads):
            found = self._cells(layer, tables[row, : -(-read.stop // BLOCK_SIZE)], index).tolist()
            wanted = [self._stamp(read.request, layer, token) for token in range(read.stop)]
            assert found[: read.stop] == wanted, f"KV of {read.request.request_id} in layer {layer} of {self.stage}"

    def _stamp(self, request: Request, layer: int, token: int) -> int:
        """Of the tokens so far: equal prefixes have equal KV."""
        return hash((tuple(request.all_token_ids[: token + 1]), self.layers[0] + layer)) % 255 + 1


class Leader(Stage):
    """Has vLLM's scheduler. A microbatch gives each request that is read to its end a token."""

    def __init__(self, host_blocks: int, link_bytes_per_s: float, sizes: PipelineSizes, *, by_priority: bool) -> None:
        super().__init__(1, host_blocks, link_bytes_per_s, sizes)
        num_blocks = sizes.num_usable(sizes.smallest, host_blocks)
        self.capacity = capacity_of(num_blocks, BLOCK_SIZE, max_num_seqs=16)
        self._handle = scheduler_handle(
            self.capacity,
            max_num_batched_tokens=STEP_TOKENS,
            prefix_caching=True,
            policy="priority" if by_priority else "fcfs",
        )
        self.sent: deque[Any] = deque()
        self._block_hasher, self._added, self._is_held, self._was_empty = None, 0, False, True
        self._run: Any = SimpleNamespace(send_step=lambda parts: self.sent.append([bytes(part) for part in parts]))
        self._withheld, self._beyond, self._ended = [], [], []
        self._arriving, self._arriving_parked = {}, set()
        self.max_in_flight, self._stage_s, self._counted_s = NUM_STAGES, 0.0, (0.0, 0.0)
        self._clock: Any = SimpleNamespace(busy_s=0.0, idle_s=0.0)
        self._microbatches = Microbatches(self.scheduler, NUM_STAGES)
        self.scheduler.watch_frees(self._note_freed)
        self.computed = Counter[str]()  # tokens, by request
        self.begun: deque[list[Read]] = deque()  # of microbatches that the follower has not run

    def _schedule(self) -> Any:
        busy = self.ids_in_flight()
        output = super()._schedule()
        assert self.residency is not None
        parked = {request.request_id for request in self.residency.parked}
        assert not parked & busy, "a request leaves between its steps"
        assert not [name for name in output.num_scheduled_tokens if self.residency.is_ordered(self.request(name))]
        starts = dict(zip(output.num_scheduled_tokens, (c.prefix_tokens for c in chunks_of(output)), strict=True))
        reads = [
            Read(self.request(name), self.block_ids(name), starts[name], starts[name] + count)
            for name, count in output.num_scheduled_tokens.items()
        ]
        self.computed.update(output.num_scheduled_tokens)
        self._reads = reads
        return output

    def _begin(self) -> bool:
        has_begun = super()._begin()
        if has_begun:
            self.work.append(self._reads)
            self.begun.append(self._reads)
        return has_begun

    def _execute(self, microbatch: Any, grammar: Any = None) -> Any:
        reads = super()._execute(microbatch)
        ids = [read.request.request_id for read in reads]
        tokens = [
            [len(read.request.all_token_ids) % 7]
            if self.knows(read.request.request_id) and read.stop >= read.request.num_tokens
            else []
            for read in reads
        ]
        return ModelRunnerOutput(ids, {name: k for k, name in enumerate(ids)}, tokens)

    def _count(self, *given: Any) -> None:
        """No figures."""


class Pipeline:
    """Both members."""

    def __init__(
        self,
        host_blocks: int = 200,
        *,
        by_priority: bool = False,
        links: tuple[float, float] = (0.0, 0.0),
        seed: int = 1,
        depth: int = 2,
    ) -> None:
        """
        Args:
            links: bytes a second of each member's; 0: as fast as it can.
            seed: of when the follower runs.
            depth: layers of each stage.
        """
        self.sizes = sizes_of(depth)
        self.follower = Stage(0, host_blocks, links[0], self.sizes)
        self.leader = Leader(host_blocks, links[1], self.sizes, by_priority=by_priority)
        self.members = [self.follower, self.leader]
        for member in self.members:
            member._open_tiers(member.tiers)
            member._lane_tiers.watch(member._uses, member._told_uses)
        assert self.leader.residency is not None
        self.parked, self.handle = self.leader.residency, self.leader.scheduler
        self.now_s, self.num_steps, self._rng = 0.0, 0, random.Random(seed)
        self.parked._clock = lambda: self.now_s

    @property
    def in_flight(self) -> int:
        """Microbatches."""
        return self.leader.num_in_flight

    def step(self) -> None:
        """As the step threads of both members. The follower is late, but never later than the leader's turn."""
        self.num_steps += 1
        self.now_s += 0.05
        while not self.leader._is_held and len(self.leader._in_flight) < NUM_STAGES and self.leader._begin():
            while self.leader.sent and self._rng.random() < 0.5:
                self._follow()
        late = len(self.leader.sent) - len(self.leader._in_flight) + 1
        for _ in range(late):
            self._follow()
        if self.leader._in_flight:
            self.leader.hold(True)  # all that could begin has begun
            self.leader.step()
            self.leader.hold(False)

    def _follow(self) -> None:
        if self.leader.sent:
            self.follower.work.append(self.leader.begun.popleft())
            self.follower.follow(self.leader.sent.popleft())

    def abort(self, name: str) -> None:
        """A request ends."""
        self.leader.abort([name])

    def has_work(self) -> bool:
        """Whether a request is here that no order keeps."""
        return self.handle.has_unfinished or self.parked.has_work() or self.in_flight > 0

    def run(self, most: int = 4000) -> None:
        """Until nothing is left to do."""
        while self.has_work():
            self.step()
            assert self.num_steps < most, "the requests do not come on"

    def close(self) -> None:
        """Ends the copies."""
        for member in self.members:
            member.world.close()


def a_request(name: str, prompt: list[int], max_tokens: int = 40) -> Request:
    """With the hashes of its blocks, as an engine prepares it."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), None, block_hasher=hasher)


def some_requests(count: int, seed: int = 1) -> list[Request]:
    """Every third begins as the one before it does."""
    rng, prompts = random.Random(seed), list[list[int]]()
    for i in range(count):
        prompt = [rng.randrange(3, 500) for _ in range(rng.choice([5, 30, 60]))]
        prompts.append(prompts[-1][:20] + prompt[:40] if i % 3 == 2 else prompt)
    return [a_request(str(i), prompt) for i, prompt in enumerate(prompts)]


def next_turn(request: Request, more: int = 5) -> Request:
    """It begins with a conversation so far."""
    return a_request(f"{request.request_id}+", [*request.all_token_ids, *[9] * more], 20)
