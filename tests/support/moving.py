"""Instances that own copies of requests, carry them to each other and die, and the links from one ingress to them.

Nothing here runs by itself: a test decides what happens next. What an instance sent stays in its link's queue until
the test delivers it, so that any interleaving of several links can be tried.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from vllm import SamplingParams

from pengserve.cluster.ingress.config import LimitConfig
from pengserve.cluster.ingress.in_flight.records import RequestBook
from pengserve.cluster.ingress.request.record import RequestRecord, Resumption
from pengserve.cluster.ingress.request.request_options import NO_OPTIONS, RequestOptions
from pengserve.cluster.ingress.request_log import RequestLog
from pengserve.cluster.ingress.tenants.fair_queue import FairQueue
from pengserve.cluster.ingress.vllm_openai_seam import EngineCoreOutput, EngineCoreRequest, FinishReason
from pengserve.planners.types.contract import NO_CONTRACT, Contract
from pengserve.planners.types.errors import LinkLostError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.snapshot import InstanceStats, KvCapacity
from pengserve.replicas.engine.wire import Moved, Trial
from pengserve.replicas.trial_gate import TrialGate
from tests.support.vllm_requests import sent_request

PROMPT = [1, 2, 3]
MAX_MODEL_LEN = 1 << 16
CAPACITY = KvCapacity(
    num_blocks=1 << 12, block_size=32, bytes_per_block=1, max_model_len=MAX_MODEL_LEN, max_num_seqs=16, weight_bytes=1
)
LOST = "lost"


def true_tokens(number: int, length: int) -> list[int]:
    """The only right answer of request `number`."""
    return [1000 * number + i for i in range(length)]


def a_request(number: int, length: int, *, priority: int = 0, max_tokens: int | None = None) -> EngineCoreRequest:
    """A request whose answer has `length` tokens: even numbers end by their limit, odd ones by themselves."""
    limit = max_tokens if max_tokens is not None else (length if number % 2 == 0 else length + 50)
    return sent_request(f"r{number}", PROMPT, SamplingParams(max_tokens=limit), priority=priority)


@dataclass
class Copy:
    """A request on an instance."""

    number: int
    num_tokens: int  # that its answer has so far
    request_id: str  # the wire id


class FakeLink:
    """The ingress's end and the instance's end of one connection."""

    def __init__(self, instance: "FakeInstance", stats: InstanceStats) -> None:
        self.instance, self.key, self.capacity, self.stats = instance, instance.key, CAPACITY, stats
        self.to_ingress: deque[Any] = deque()
        self.to_instance: deque[Callable[[], object]] = deque()
        self.is_broken = False  # at the instance's end; the ingress learns of it by LOST
        self.refuses = False  # the ingress's sends fail already, though it has not read LOST yet
        self.aborts: list[list[str]] = []
        self.contracts: list[Contract] = []  # of what was sent
        self.orders: dict[str, tuple[int, float]] = {}  # by wire id, the newest

    def add(
        self,
        request: EngineCoreRequest,
        output_token_ids: Sequence[int] = (),
        *,
        is_tried_alone: bool = False,
        predicted_hit_tokens: int = 0,
        contract: Contract = NO_CONTRACT,
    ) -> None:
        """See `InstanceLink`."""
        self.contracts.append(contract)
        if self.refuses:
            raise LinkLostError("gone")
        wire_id, done = request.request_id, list(output_token_ids)
        number = int(wire_id[1:].split("~")[0])
        assert done == true_tokens(number, len(done)), "a request is sent again with what was received"
        copy = Copy(number, len(done), wire_id)
        self.to_instance.append(lambda: self.instance.gate.take(copy, is_tried_alone=is_tried_alone))

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `InstanceLink`."""
        ids = list(request_ids)
        self.aborts.append(ids)
        self.to_instance.append(lambda: self.instance.forget(ids))

    def reorder(self, orders: Sequence[tuple[str, int, float]]) -> None:
        """See `InstanceLink`."""
        self.orders |= {wire_id: (priority, arrival_time) for wire_id, priority, arrival_time in orders}

    def read(self) -> None:
        """The instance reads one frame."""
        if self.to_instance:
            frame = self.to_instance.popleft()
            if not self.is_broken:
                frame()


@dataclass
class FakeInstance:
    """One life of an instance."""

    key: InstanceKey
    lengths: dict[int, int]  # answers by request number; shared
    is_alive: bool = True
    link: FakeLink | None = None  # its newest connection while that is up
    copies: dict[str, Copy] = field(default_factory=dict)
    gate: TrialGate[Copy] = field(init=False)

    def __post_init__(self) -> None:
        self.gate = self._new_gate()

    def _new_gate(self) -> TrialGate[Copy]:
        return TrialGate(
            let_in=self.take, tell=self._tell, num_requests=lambda: len(self.copies), is_reading=lambda: False
        )

    def take(self, copy: Copy) -> None:
        """A request is computed here from now on."""
        assert copy.request_id not in self.copies, "a wire id names one copy"
        self.copies[copy.request_id] = copy

    def forget(self, wire_ids: Sequence[str]) -> None:
        """Requests are wanted no more."""
        for wire_id in wire_ids:
            self.copies.pop(wire_id, None)
        self.gate.forget(wire_ids)

    def _tell(self, copy: Copy, is_alone: bool) -> None:
        if self.link is not None:
            self.link.to_ingress.append(Trial(copy.request_id, is_alone))

    def step(self) -> None:
        """One token for each copy, in one batch."""
        outputs = []
        for wire_id, copy in list(self.copies.items()):
            length = self.lengths[copy.number]
            assert copy.num_tokens < length, "a complete request is not sent again"
            token = true_tokens(copy.number, length)[copy.num_tokens]
            copy.num_tokens += 1
            reason = None
            if copy.num_tokens == length:
                reason = FinishReason.LENGTH if copy.number % 2 == 0 else FinishReason.STOP
                del self.copies[wire_id]
            outputs.append(EngineCoreOutput(request_id=wire_id, new_token_ids=[token], finish_reason=reason))
        if self.link is not None and outputs:
            self.link.to_ingress.append(outputs)
        self.gate.stepped(outputs, InstanceStats())

    def carry(self, to: "FakeInstance", wire_ids: Sequence[str]) -> None:
        """`to` goes on with these copies. An instance takes them only while their client is connected to it."""
        assert self.link is not None and to.link is not None
        for wire_id in wire_ids:
            to.take(self.copies.pop(wire_id))
        self.link.to_ingress.append(Moved(list(wire_ids), to.key, True))

    def redirect(self, wire_ids: Sequence[str], to: InstanceKey | None) -> None:
        """The ingress must send these again."""
        assert self.link is not None
        for wire_id in wire_ids:
            del self.copies[wire_id]
        self.link.to_ingress.append(Moved(list(wire_ids), to, False))

    def cut(self, num_delivered: int, *, refuses: bool) -> None:
        """The connection ends; `num_delivered` of the frames on their way still arrive."""
        assert self.link is not None
        link, self.link = self.link, None
        link.is_broken, link.refuses = True, refuses
        while len(link.to_ingress) > num_delivered:
            link.to_ingress.pop()
        link.to_ingress.append(LOST)
        self.copies.clear()
        self.gate = self._new_gate()  # a client's requests are forgotten there as well


class FakePool:
    """The `Links` of a book."""

    def __init__(self) -> None:
        self.links: dict[InstanceKey, FakeLink] = {}
        self.routes: set[InstanceKey] = set()
        self.leaving: set[InstanceKey] = set()

    def ready(self) -> list[Any]:
        """See `Links`."""
        return [link for key, link in self.links.items() if key in self.routes]

    def find(self, key: InstanceKey) -> Any:
        """See `Links`."""
        return self.links.get(key)

    def is_leaving(self, key: InstanceKey) -> bool:
        """See `Links`."""
        return key in self.leaving

    def discard(self, link: Any) -> None:
        """See `Links`."""
        if self.links.get(link.key) is link:
            del self.links[link.key]


class Cluster:
    """Instances, the ingress's book, and what its clients have seen. Is the book's `RecordEvents`."""

    def __init__(
        self,
        num_instances: int,
        *,
        limits: LimitConfig | None = None,
        is_only_ingress: bool = True,
        fair: FairQueue | None = None,
    ) -> None:
        self.lengths: dict[int, int] = {}
        self.pool = FakePool()
        self.max_model_len = MAX_MODEL_LEN
        patient = LimitConfig(max_losses=10_000, max_losses_in_place=10_000, max_deaths_alone=10_000)
        self.passed_s = 0.0  # that the book's clock is ahead
        clock = lambda: monotonic() + self.passed_s  # noqa: E731
        self.is_superseded = False  # another configuration has taken over
        self.book = RequestBook(
            self,
            limits or patient,
            self.pool,
            lambda: self.max_model_len,
            clock,
            lambda: self.is_superseded,
            is_only_ingress=is_only_ingress,
            fair=fair,
        )
        self.instances = [
            FakeInstance(InstanceKey(instance_id=InstanceId(i), incarnation=0), self.lengths)
            for i in range(num_instances)
        ]
        self.open_links: dict[InstanceKey, FakeLink] = {}  # until the ingress has read their end
        self.seen: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.failed: dict[str, Exception] = {}
        self.finishes: dict[str, str] = {}
        self.request_log = RequestLog()
        self.log: list[tuple[str, Any]] = []
        self.resumptions: list[Resumption] = []

    # RecordEvents

    def on_failed(self, request_id: str, error: Exception) -> None:
        """See `RecordEvents`."""
        self.failed[request_id] = error

    def on_ended(self, record: RequestRecord, finish: str) -> None:
        """See `RecordEvents`."""
        assert record.request.request_id not in self.finishes, "a request ends once"
        self.finishes[record.request.request_id] = finish
        self.request_log.note(record, finish)

    def on_finished(self, output: EngineCoreOutput) -> None:
        """See `RecordEvents`."""
        self._see([output])

    def on_dispatched(self, key: InstanceKey, resumed: Resumption | None) -> None:
        """See `RecordEvents`."""
        self.log.append(("dispatched", key) if resumed is None else ("resumed", key))
        self.resumptions += [resumed] if resumed is not None else []

    def on_resumed(self, gap_s: float) -> None:
        """See `RecordEvents`."""
        assert gap_s >= 0

    def on_request_moved(self, *, carried: bool) -> None:
        """See `RecordEvents`."""
        self.log.append(("moved", carried))

    def on_switched(self, gap_s: float) -> None:
        """See `RecordEvents`."""
        assert gap_s >= 0
        self.log.append(("switched", gap_s))

    # What a test does

    def connect(self, instance: FakeInstance, stats: InstanceStats | None = None) -> FakeLink:
        """Opens the ingress's link to an instance."""
        assert instance.is_alive and instance.key not in self.open_links
        link = instance.link = FakeLink(instance, stats or InstanceStats())
        self.open_links[instance.key] = self.pool.links[instance.key] = link
        self.pool.routes.add(instance.key)
        self.book.tend()
        return link

    def request(self, number: int, length: int, wanted: RequestOptions = NO_OPTIONS, **options: Any) -> None:
        """A client asks."""
        self.lengths[number], self.seen[number] = length, []
        self.book.add(a_request(number, length, **options), wanted)

    def abort(self, number: int) -> None:
        """A client goes away."""
        self.ended.add(number)
        self.book.abort([f"r{number}"])

    def deliver(self, link: FakeLink) -> None:
        """The ingress reads the next frame of `link`, if there is one."""
        if not link.to_ingress:
            return
        frame = link.to_ingress.popleft()
        book: Any = self.book
        if frame is LOST:
            self.pool.discard(link)
            del self.open_links[link.key]
            self.book.lose(link)  # type: ignore[arg-type]
        elif isinstance(frame, Moved):
            self._see(book.move(link, frame))
        elif isinstance(frame, Trial):
            book.note_trial(link, frame)
        else:
            self._see(book.accept(link, frame))

    def settle(self, rounds: int = 200) -> None:
        """Everything goes on, fairly, until nothing happens any more."""
        for _ in range(rounds):
            for link in list(self.open_links.values()):
                while link.to_instance:
                    link.read()
            for instance in self.instances:
                instance.step()
            for link in list(self.open_links.values()):
                while link.to_ingress:
                    self.deliver(link)
            self.book.tend()

    def _see(self, outputs: Sequence[EngineCoreOutput]) -> None:
        for output in outputs:
            number = int(output.request_id[1:])
            assert number not in self.ended, "an ended request gets no more"
            seen, length = self.seen[number], self.lengths[number]
            seen += output.new_token_ids
            assert seen == true_tokens(number, length)[: len(seen)], "the tokens are a prefix of the true sequence"
            if output.finish_reason is not None:
                assert len(seen) == length, "an answer that ends is whole"
                self.ended.add(number)
