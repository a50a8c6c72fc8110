"""Instances in this process that migrate requests to each other: real migrations, schedulers, transfers and KV memory.

The model is a sum: the next token follows from the KV of all tokens before it, read from the request's own blocks. A
block that is missing, stale or at the wrong place changes the answer. Nothing runs by itself: `World.act` lets one
thing happen, in an order that the test's random source chooses.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams

from pengserve.planners.types.errors import LinkLostError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.engine.handoff import Handoff
from pengserve.replicas.engine.lane import Lane
from pengserve.replicas.engine.vllm_seam import (
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    Request,
    RequestStatus,
)
from pengserve.replicas.kv.ledger import CellLedger
from pengserve.replicas.kv.transfers import Transfers
from pengserve.replicas.memory.kv_views import BlockLayout, KvView
from pengserve.replicas.migration.migrations import Migrations
from pengserve.replicas.switching.member import Member
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.vllm_build import build_vllm_scheduler
from tests.support.vllm_requests import sent_request

BLOCK, LAYERS, VOCABULARY = 16, 2, 997
BLOCK_BYTES = 2 * BLOCK * LAYERS * 8
TIMEOUT_S = 60.0


def a_request(name: str, num_prompt: int, max_tokens: int, *, is_guided: bool = False) -> EngineCoreRequest:
    """A request whose prompt follows from its name."""
    source = random.Random(name)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    if is_guided:
        params.prompt_logprobs = 1  # as a grammar, it cannot be carried before its first token
    return sent_request(name, [source.randrange(VOCABULARY) for _ in range(num_prompt)], params)


def true_tokens(request: EngineCoreRequest) -> list[int]:
    """The only right answer."""
    known = list(request.prompt_token_ids or ())
    assert request.sampling_params is not None and request.sampling_params.max_tokens
    total = sum((token + 1) * (place + 1) for place, token in enumerate(known))
    answer: list[int] = []
    for _ in range(request.sampling_params.max_tokens):
        answer.append(total % VOCABULARY)
        total += (answer[-1] + 1) * (len(known) + 1)
        known.append(answer[-1])
    return answer


class SumLane(Lane):
    """A lane of vLLM's scheduler over real KV memory. The runner knows nothing but what it is told."""

    def __init__(self, num_blocks: int) -> None:
        capacity = KvCapacity(
            num_blocks=num_blocks,
            block_size=BLOCK,
            bytes_per_block=BLOCK_BYTES,
            max_model_len=num_blocks * BLOCK,
            max_num_seqs=8,
            weight_bytes=0,
        )
        scheduler = build_vllm_scheduler(capacity, SchedulerOptions(max_num_batched_tokens=64), is_terse=False)
        super().__init__(shape="dp", capacity=capacity, scheduler=scheduler, block_hasher=None)
        elements = 2 * BLOCK
        self.kv = [torch.full((num_blocks + 1, elements), -1e6, dtype=torch.float64) for _ in range(LAYERS)]
        place = torch.arange(elements).view(2, BLOCK, 1, 1)
        self.view = KvView(self.kv, BlockLayout(place))
        self.num_kv_groups = 1
        self.core = SimpleNamespace(batch_queue=None)
        self.pristine_config = SimpleNamespace(speculative_config=None)
        self.adopted: set[str] = set()

    def step(self) -> Mapping[int, EngineCoreOutputs]:
        output = self.scheduler.schedule()
        ids, sampled = list(output.num_scheduled_tokens), []
        for request_id in ids:
            request = self.request(request_id)
            stop = request.num_computed_tokens
            blocks = self.block_ids(request_id)
            for position in range(stop - output.num_scheduled_tokens[request_id], stop):
                value = (request.all_token_ids[position] + 1) * (position + 1)
                for layer in self.kv:
                    layer[blocks[position // BLOCK], [position % BLOCK, BLOCK + position % BLOCK]] = float(value)
            sampled.append([self._next(blocks, stop)] if stop == request.num_tokens else [])
        result = ModelRunnerOutput(ids, {name: index for index, name in enumerate(ids)}, sampled)
        return self.scheduler.update(output, result)

    def _next(self, blocks: Sequence[int], stop: int) -> int:
        sums = [layer.view(-1, 2, BLOCK)[list(blocks)].transpose(0, 1).flatten(1)[:, :stop].sum(1) for layer in self.kv]
        found = {int(total) for layer in sums for total in layer.tolist()}
        assert len(found) == 1, f"layers, or keys and values, disagree: {found}"
        return found.pop() % VOCABULARY

    def adopt(self, request: Request) -> None:
        assert request.request_id not in self.adopted, "it was taken twice"
        self.adopted.add(request.request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        self.adopted -= set(request_ids)


@dataclass
class Record:
    """What the ingress knows of one request."""

    request: EngineCoreRequest
    at: InstanceKey
    wire_id: str
    tokens: list[int] = field(default_factory=list)
    stash: dict[InstanceKey, list[Any]] = field(default_factory=dict)
    num_sent: int = 1
    is_over: bool = False


class Ingress:
    """Follows requests by the rules of `cluster/ingress/records.py`."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.records: dict[str, Record] = {}  # by request id
        self._by_wire: dict[str, Record] = {}

    def send(self, request: EngineCoreRequest, at: InstanceKey) -> None:
        record = self.records[request.request_id] = Record(request, at, request.request_id)
        self._place(record, at)

    def _place(self, record: Record, at: InstanceKey) -> None:
        record.at, record.stash = at, {}
        self._by_wire[record.wire_id] = record
        instance = self._world.instances[at]
        instance.submit(lambda: instance.add(record.request, record.wire_id, list(record.tokens)))

    def hear(self, link: InstanceKey, wire_id: str, event: Any) -> None:
        """`event` is a token, ("moved", to), ("again",) or "end"."""
        record = self._by_wire.get(wire_id)
        if record is None or record.is_over:
            instance = self._world.instances.get(link)
            if instance is not None and isinstance(event, int):
                instance.submit(lambda: instance.abort(wire_id))
        elif record.at != link:
            record.stash.setdefault(link, []).append(event)
        else:
            self._apply(record, event)

    def _apply(self, record: Record, event: Any) -> None:
        if isinstance(event, int):
            record.tokens.append(event)
            params = record.request.sampling_params
            assert params is not None
            record.is_over = len(record.tokens) == params.max_tokens
        elif event[0] == "again" or event[1] not in self._world.instances:
            self._again(record)
        else:
            at = record.at = event[1]
            waiting = record.stash.pop(at, [])
            while waiting and record.at == at and not record.is_over:
                self._apply(record, waiting.pop(0))
            if waiting:  # of its next visit there
                record.stash[at] = waiting + record.stash.get(at, [])

    def _again(self, record: Record) -> None:
        del self._by_wire[record.wire_id]
        record.num_sent += 1
        record.wire_id = f"{record.request.request_id}~{record.num_sent}"
        others = [key for key in self._world.instances if key != record.at]
        self._place(record, others[0] if others else record.at)

    def lose(self, link: InstanceKey) -> None:
        for record in list(self.records.values()):
            record.stash.pop(link, None)
            if record.at == link and not record.is_over:
                self._again(record)


class SumInstance:
    """One instance."""

    def __init__(self, world: "World", key: InstanceKey, num_blocks: int) -> None:
        self.world, self.key = world, key
        self.lane = SumLane(num_blocks)
        self.commands: deque[Callable[[], object]] = deque()
        self.open: dict[str, EngineCoreRequest] = {}
        self.is_switching = False
        ledger = CellLedger(num_blocks + 1, "dp")
        self.transfers = Transfers(ledger)
        self.lanes: Any = SimpleNamespace(
            dp=self.lane,
            running=None,
            transfers=self.transfers,
            dp_view=lambda: self.lane.view,
            num_migrated=0,
            migrated_bytes=0,
        )
        self.handlers: dict[str, Any] = {}
        self.lost_handlers: list[Any] = []
        member = Member(self.key, self.lanes, self, None, self, TIMEOUT_S)  # type: ignore[arg-type]
        self.migrations = Migrations(member, self.submit, lambda: self.is_switching, lambda: None)

    # The network and the owner of requests ----------------------------------------------------------------------------

    def subscribe(self, kind: str, on_message: Any, on_lost: Any = None) -> None:
        self.handlers[kind] = on_message
        self.lost_handlers += [on_lost] if on_lost is not None else []

    def send(self, key: InstanceKey, kind: str, parts: Sequence[Any]) -> None:
        if key not in self.world.instances or (self.key, key) in self.world.broken:
            raise LinkLostError(f"instance {key} is gone")
        message = [memoryview(bytearray(bytes(memoryview(part).cast("B")))) for part in parts]
        self.world.wires.setdefault((self.key, key), deque()).append((kind, message))

    def handoff(self, request: Request) -> Handoff | None:
        sent = self.open.get(request.request_id)
        if sent is None:
            return None
        return Handoff(sent, "ingress", list(request.output_token_ids), request.num_computed_tokens)

    def serves(self, client_id: str) -> bool:
        return self.key not in self.world.unserved

    def welcome(self, handoff: Handoff) -> int | None:
        self.open[handoff.request.request_id] = handoff.request
        return 0 if self.serves("") else None

    def moved(self, request_ids: list[str], to: InstanceKey | None, *, carried: bool) -> None:
        for wire_id in request_ids:
            if self.open.pop(wire_id, None) is not None:
                event = ("moved", to) if carried else ("again",)
                self.world.links.setdefault(self.key, deque()).append((wire_id, event))

    # Steps ------------------------------------------------------------------------------------------------------------

    def submit(self, command: Callable[[], object]) -> None:
        self.commands.append(command)

    def add(self, request: EngineCoreRequest, wire_id: str, tokens: list[int]) -> None:
        sent = a_request(request.request_id, 0, 1)
        sent.request_id, sent.prompt_token_ids = wire_id, request.prompt_token_ids
        sent.sampling_params = request.sampling_params
        self.open[wire_id] = sent
        made = Request.from_engine_core_request(sent, None)
        if tokens:
            made.append_output_token_ids(tokens)
            made.status, made.num_preemptions = RequestStatus.PREEMPTED, 1
        self.lane.add(made)

    def abort(self, wire_id: str) -> None:
        self.open.pop(wire_id, None)
        self.lane.release([wire_id])

    def step(self) -> None:
        if self.lane.has_work():
            for batch in self.lane.step().values():
                for output in batch.outputs:
                    for token in output.new_token_ids:
                        self.world.links.setdefault(self.key, deque()).append((output.request_id, token))
                    if output.finish_reason is not None:
                        self.open.pop(output.request_id, None)
        if self.transfers.is_busy:
            self.transfers.advance(0.005)
        if self.migrations.is_busy:
            self.migrations.boundary()

    def run_commands(self) -> None:
        for _ in range(len(self.commands)):
            self.commands.popleft()()

    def require_laws(self) -> None:
        assert self.transfers.check() == () and self.transfers._ledger.check() == ()


class World:
    """Some instances, their connections, and the ingress."""

    def __init__(self, seed: int = 0, num_blocks: Sequence[int] = (80, 80)) -> None:
        self.source = random.Random(seed)
        self.broken: set[tuple[InstanceKey, InstanceKey]] = set()
        self.unserved: set[InstanceKey] = set()  # instances that the ingress is not connected to
        self.wires: dict[tuple[InstanceKey, InstanceKey], deque[Any]] = {}
        self.links: dict[InstanceKey, deque[Any]] = {}
        keys = [InstanceKey(instance_id=InstanceId(i), incarnation=1) for i in range(len(num_blocks))]
        self.instances = {key: SumInstance(self, key, n) for key, n in zip(keys, num_blocks, strict=True)}
        self.keys = keys
        self.ingress = Ingress(self)
        self._num_orders = 0

    def at(self, index: int) -> SumInstance:
        return self.instances[self.keys[index]]

    def order(self, source: int, target: int, **fields: Any) -> Migrate:
        self._num_orders += 1
        order = Migrate(
            order_id=str(self._num_orders),
            source=self.keys[source],
            target=self.keys[target],
            **({"max_tokens": 1 << 20} | fields),
        )
        self.at(source).migrations.order([order])
        return order

    def send(self, count: int, at: int = 0, *, num_prompt: int = 70, max_tokens: int = 60) -> None:
        for _ in range(count):
            name = f"r{len(self.ingress.records)}"
            self.ingress.send(a_request(name, num_prompt, max_tokens), self.keys[at])

    def act(self) -> None:
        """One thing happens: an instance steps, a message arrives, or the ingress reads."""
        key = self.source.choice(list(self.instances))
        what, instance = self.source.random(), self.instances[key]
        if what < 0.4:
            wires = [pair for pair, wire in self.wires.items() if pair[1] == key and wire]
            if wires:
                pair = self.source.choice(wires)
                kind, message = self.wires[pair].popleft()
                instance.handlers[kind](pair[0], kind, message)
        elif what < 0.6:
            if self.links.get(key):
                self.ingress.hear(key, *self.links[key].popleft())
        else:
            instance.run_commands()
            instance.step()
        instance.require_laws()

    def deliver(self, source: int, target: int) -> None:
        """All messages on the way between two instances arrive."""
        pair = self.keys[source], self.keys[target]
        while self.wires.get(pair):
            kind, message = self.wires[pair].popleft()
            self.instances[pair[1]].handlers[kind](pair[0], kind, message)

    def run(self, until: Callable[[], bool], limit: int = 200_000) -> None:
        """Acts until the condition holds."""
        for _ in range(limit):
            if until():
                return
            self.act()
        raise AssertionError("it did not happen")

    def run_to_the_end(self) -> None:
        """Until all requests have ended, and nothing is on its way."""
        self.run(lambda: all(record.is_over for record in self.ingress.records.values()))
        self.run(self.is_still)
        self.require_right()

    def is_still(self) -> bool:
        quiet = not any(self.wires.values()) and not any(self.links.values())
        return quiet and not any(
            i.commands or i.lane.num_requests() or i.migrations.is_moving or i.migrations._orders or i.transfers.is_busy
            for i in self.instances.values()
        )

    def require_right(self) -> None:
        """All answers are right, and all blocks are free again."""
        for record in self.ingress.records.values():
            assert record.tokens == true_tokens(record.request), record.request.request_id
        for instance in self.instances.values():
            assert instance.lane.num_free() == instance.lane.capacity.num_blocks, f"{instance.key} keeps blocks"

    def kill(self, index: int) -> None:
        """The process of an instance ends; what it had sent may arrive in part."""
        key = self.keys[index]
        del self.instances[key]
        self.links.pop(key, None)
        for pair in [pair for pair in self.wires if key in pair]:
            del self.wires[pair]
        for other in self.instances.values():
            for on_lost in other.lost_handlers:
                on_lost(key)
        self.ingress.lose(key)

    def num_migrated(self) -> int:
        return sum(instance.lanes.num_migrated for instance in self.instances.values())
