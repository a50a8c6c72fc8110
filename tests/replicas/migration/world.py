"""Instances in this process that migrate requests to each other: real migrations, schedulers, transfers and KV memory.

Instances are alone, or in groups of any shape. Nothing runs by itself: `World.act` lets one thing happen, in an order
that the test's random source chooses.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pengserve.planners.types.errors import EngineError, LinkLostError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.orders import Migrate, Redirect
from pengserve.replicas.engine.groups.group_run import STEP, GroupRun
from pengserve.replicas.engine.groups.leases import Leases
from pengserve.replicas.engine.lanes.handoff import Handoff
from pengserve.replicas.engine.vllm_seam import EngineCoreRequest, Request, RequestStatus
from pengserve.replicas.kv.transfers import Transfers
from pengserve.replicas.migration.migrations import Migrations
from pengserve.replicas.switching.member import Member
from tests.replicas.migration.sum_lanes import SumLane, SumPpLane, SumTpLane, a_request, true_tokens

TIMEOUT_S = 60.0


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
    """Follows requests by the rules of `cluster/ingress/in_flight/records.py`."""

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
        takers = [key for key, instance in self._world.instances.items() if instance.leads]
        others = [key for key in takers if key != record.at]
        self._place(record, others[0] if others else takers[0])

    def lose(self, link: InstanceKey) -> None:
        for record in list(self.records.values()):
            record.stash.pop(link, None)
            if record.at == link and not record.is_over:
                self._again(record)


class SumInstance:
    """One instance: alone, or a member of a group."""

    def __init__(self, world: "World", key: InstanceKey, num_blocks: int) -> None:
        self.world, self.key = world, key
        self.dp = SumLane(num_blocks)
        self.commands: deque[Callable[[], object]] = deque()
        self.open: dict[str, EngineCoreRequest] = {}
        self.is_switching = False
        self.num_steps_sent: dict[InstanceKey, int] = {}
        self.num_followed = 0
        self.leases = Leases(self.dp)  # type: ignore[arg-type]
        self.transfers = Transfers(self.leases.ledger)
        self.lanes: Any = SimpleNamespace(
            dp=self.dp,
            running=None,
            current=self.dp,
            transfers=self.transfers,
            dp_view=lambda: self.dp.view,
            num_migrated=0,
            migrated_bytes=0,
        )
        self.handlers: dict[str, Any] = {STEP: lambda key, kind, parts: self.submit(lambda: self.follow(parts))}
        self.lost_handlers: list[Any] = [lambda key: self.submit(lambda: self.lost(key))]
        member = Member(self.key, self.lanes, self, None, self, TIMEOUT_S)  # type: ignore[arg-type]
        self.migrations = Migrations(member, self.submit, lambda: self.is_switching, lambda: None)

    # Its group --------------------------------------------------------------------------------------------------------

    @property
    def lane(self) -> Any:
        """The lane that takes requests here."""
        return self.lanes.current

    @property
    def leads(self) -> bool:
        """Whether requests may be sent here."""
        return self.lanes.running is None or self.lanes.running.leads

    def enter(self, group: Group, members: tuple[InstanceKey, ...]) -> None:
        """Runs in a group from now on."""
        rank, name = members.index(self.key), str(group)
        if group.kind is GroupKind.TP:
            lane: Any = SumTpLane(self.dp, name, rank, group.degree, self.leases.lease)  # type: ignore[arg-type]
        else:
            lane = SumPpLane(self.dp, name, rank, group.degree)
            every = range(1, lane.capacity.num_blocks + 1)
            lane.table.lease(every, every)
            self.leases.lend_all(lane)
        communicator: Any = SimpleNamespace(name=name, members=members, timeout_s=TIMEOUT_S)
        lane._run = GroupRun(communicator=communicator, seed=0, post=self)
        self.lanes.running = lane
        self.lanes.current = lane if rank == 0 else self.dp

    def follow(self, parts: list[memoryview]) -> None:
        self.num_followed += 1
        if self.lanes.running is not None and not self.leads:
            self.lanes.running.follow(parts[1:])

    def lost(self, key: InstanceKey) -> None:
        running = self.lanes.running
        if running is not None and key in running.run.members:
            self.break_group()

    def break_group(self) -> None:
        """As an agent leaves a group that cannot go on."""
        lane = self.lanes.running
        self.migrations.break_off()
        lost = [request.request_id for request in lane.requests()] if lane.leads else []
        self.lanes.running, self.lanes.current = None, self.dp
        self.transfers.cancel_of(lane.name)
        self.leases.return_all(lane)
        self.moved(lost, None, carried=False)

    # The network and the owner of requests ----------------------------------------------------------------------------

    def subscribe(self, kind: str, on_message: Any, on_lost: Any = None) -> None:
        self.handlers[kind] = on_message
        self.lost_handlers += [on_lost] if on_lost is not None else []

    def send(self, key: InstanceKey, kind: str, parts: Sequence[Any]) -> None:
        if key not in self.world.instances or (self.key, key) in self.world.broken:
            raise LinkLostError(f"instance {key} is gone")
        self.world.num_sent[kind] = self.world.num_sent.get(kind, 0) + 1
        if kind == STEP:
            self.num_steps_sent[key] = self.num_steps_sent.get(key, 0) + 1
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
        if not self.leads:
            self.moved([wire_id], None, carried=False)
            return
        made = Request.from_engine_core_request(sent, None)
        if tokens:
            made.append_output_token_ids(tokens)
            made.status, made.num_preemptions = RequestStatus.PREEMPTED, 1
        self.lane.add(made)

    def abort(self, wire_id: str) -> None:
        self.open.pop(wire_id, None)
        self.migrations.let_go([wire_id])
        for lane in {id(lane): lane for lane in (self.dp, self.lane)}.values():
            lane.abort([wire_id])

    def step(self) -> None:
        if self.leads and not self.is_ahead and self.lane.has_work():
            try:
                batches = self.lane.step()
            except EngineError:  # a member is gone, and this one has not heard of it
                self.break_group()
                return
            for batch in batches.values():
                for output in batch.outputs:
                    for token in output.new_token_ids:
                        self.world.links.setdefault(self.key, deque()).append((output.request_id, token))
                    if output.finish_reason is not None:
                        self.open.pop(output.request_id, None)
        if self.transfers.is_busy:
            self.transfers.advance(0.0)
        if self.migrations.is_busy:
            self.migrations.boundary()

    @property
    def is_ahead(self) -> bool:
        """Whether it must wait for other members, as activations make it wait."""
        others = self.world.instances
        most = 0 if self.lanes.running is None or self.lanes.running.shape.startswith("tp") else 1
        return any(
            count - others[key].num_followed > most for key, count in self.num_steps_sent.items() if key in others
        )

    def run_commands(self) -> None:
        for _ in range(len(self.commands)):
            self.commands.popleft()()

    def require_laws(self) -> None:
        running = self.lanes.running
        assert self.transfers.check() == ()
        assert self.leases.check([running] if running is not None else [], running) == []


class World:
    """Some instances, their connections, and the ingress."""

    def __init__(
        self, seed: int = 0, num_blocks: Sequence[int] = (80, 80), shapes: Sequence[str] | None = None
    ) -> None:
        """A group of each shape, or instances alone; `num_blocks` are of each instance of a group."""
        self.source = random.Random(seed)
        self.broken: set[tuple[InstanceKey, InstanceKey]] = set()
        self.unserved: set[InstanceKey] = set()  # instances that the ingress is not connected to
        self.wires: dict[tuple[InstanceKey, InstanceKey], deque[Any]] = {}
        self.links: dict[InstanceKey, deque[Any]] = {}
        self.instances: dict[InstanceKey, SumInstance] = {}
        self.sides: list[tuple[InstanceKey, ...]] = []
        for shape, count in zip(shapes or ["dp"] * len(num_blocks), num_blocks, strict=True):
            self._make(shape, count)
        self.keys = [side[0] for side in self.sides]  # leaders
        self.ingress = Ingress(self)
        self._num_orders = 0
        self.num_sent: dict[str, int] = {}  # messages between instances, by kind

    def _make(self, shape: str, num_blocks: int) -> None:
        degree = 1 if shape == "dp" else int(shape[2:])
        ids = tuple(InstanceId(len(self.instances) + i) for i in range(degree))
        keys = tuple(InstanceKey(instance_id=instance_id, incarnation=1) for instance_id in ids)
        self.sides.append(keys)
        for key in keys:
            self.instances[key] = SumInstance(self, key, num_blocks)
        if degree > 1:
            for key in keys:
                self.instances[key].enter(Group(kind=GroupKind(shape[:2]), members=ids), keys)

    def at(self, index: int) -> SumInstance:
        """The leader of a group."""
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

    def redirect(self, source: int, target: int, max_tokens: int = 1 << 20) -> Redirect:
        """Orders what waits without KV at one side to be sent to another."""
        self._num_orders += 1
        order = Redirect(
            order_id=str(self._num_orders), source=self.keys[source], target=self.keys[target], max_tokens=max_tokens
        )
        self.at(source).migrations.order([order])
        return order

    def send(self, count: int, at: int = 0, *, num_prompt: int = 70, max_tokens: int = 60, family: str = "") -> None:
        for _ in range(count):
            name = f"r{len(self.ingress.records)}"
            self.ingress.send(a_request(name, num_prompt, max_tokens, family=family), self.keys[at])

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
        if self.source.random() < 0.1:  # they cost as much as a step
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
        for instance in self.instances.values():
            instance.require_laws()
        for record in self.ingress.records.values():
            assert record.tokens == true_tokens(record.request), record.request.request_id
        for instance in self.instances.values():
            for lane in (instance.dp, instance.lane):
                assert lane.num_free() == lane.num_held, f"{instance.key} keeps blocks"

    def kill(self, index: int, rank: int = 0) -> None:
        """The process of a member of a group ends; what it had sent may arrive in part."""
        key = self.sides[index][rank]
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
