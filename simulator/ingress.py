"""The ingress in virtual time: which instance each request goes to, and where it goes on after switches and deaths.

The policy is production's (`cluster/ingress/in_flight/records.py` and `dispatcher.py`), without its wire: words between
instances and ingress take no time here, so that no copy of a request is ever unknown, and the newest stats are the
present ones.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from pengserve.planners.admission import IngressLoad, admit
from pengserve.planners.dispatch import DispatchOptions
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.snapshot import Demand, RoutingTable
from pengserve.simulator.dispatcher import Dispatch, SimDispatcher
from pengserve.simulator.engine.cluster import SimCluster
from pengserve.simulator.engine.instance import SimInstance
from pengserve.simulator.requests import Arrival, LiveRequest

PLACE_PERIOD_S = 0.25  # how often waiting requests are tried again, as in production
MAX_REDIRECTS_IN_PLACE = 8  # in a row without a new token; more of them wait a period each


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressLimits:
    """As `cluster.ingress.config.LimitConfig`."""

    no_instance_timeout_s: float = 300.0  # a request waits so long for an instance that can take it
    parallelism_wait_s: float = 2.0  # ... and so long for a group of the degree it asks for; then any will do
    max_losses: int = 32  # instances that may die under one request
    max_losses_in_place: int = 8  # the same, in a row without one new token
    max_queued_requests: int | None = None  # beyond what runs at once; more are refused. None: all are taken


@dataclass(slots=True, eq=False)
class _Record:
    """What the ingress knows of a request that has not ended."""

    request: LiveRequest
    created_s: float
    waiting_since_s: float = 0.0
    num_losses: int = 0
    num_losses_in_place: int = 0
    num_redirects_in_place: int = 0
    num_tokens_placed: int = 0  # generated, when it was last lost or redirected

    def note_progress(self) -> None:
        """Counts of misfortunes in a row begin anew with each new token."""
        if self.request.num_generated > self.num_tokens_placed:
            self.num_losses_in_place = self.num_redirects_in_place = 0
        self.num_tokens_placed = self.request.num_generated


class SimIngress:
    """All requests in flight. `on_end` gets each one once, with the reason where it was not served."""

    def __init__(self, limits: IngressLimits, on_end: Callable[[LiveRequest, str], None]) -> None:
        self._limits, self._on_end = limits, on_end
        self._records: dict[LiveRequest, _Record] = {}
        self._waiting: deque[_Record] = deque()
        self._max_model_len = self._num_slots = 0
        self._urgent: set[LiveRequest] = set()
        self._wanted: Counter[int] = Counter()
        self._tending: asyncio.TimerHandle | asyncio.Handle | None = None

    def serve(
        self, cluster: SimCluster, dispatch: Dispatch = "load", *, num_ingresses: int = 1, finds_prefixes: bool = False
    ) -> None:
        """Sends requests to `cluster` from now on. Each of the two needs the other, so that this comes second."""
        self._cluster = cluster
        self._dispatcher = SimDispatcher(cluster, dispatch, num_ingresses=num_ingresses, finds_prefixes=finds_prefixes)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_routes(self) -> int:
        """Places that requests can be sent to."""
        return len(self._dispatcher)

    def requests(self) -> list[LiveRequest]:
        """All that have come and not ended, by arrival."""
        return list(self._records)

    @property
    def num_waiting(self) -> int:
        """Requests without an instance."""
        return len(self._waiting)

    # What comes -------------------------------------------------------------------------------------------------------

    def add(self, arrival: Arrival) -> None:
        """Takes a request and sends it to an instance, now or as soon as there is one that can take it."""
        request = LiveRequest(arrival, came_s=_now_s())
        if why := self._refusal(arrival):
            self._on_end(request, why)
            return
        record = _Record(request, _now_s())
        self._records[request] = record
        if arrival.priority < 0:
            self._urgent.add(request)
        if arrival.degree is not None:
            self._wanted[arrival.degree] += 1
        self._place_or_wait(record, first=False)

    def route(self, table: RoutingTable) -> None:
        """Takes a newer routing table."""
        self._dispatcher.route(route.key for route in table.routes)
        self._max_model_len = self._cluster.longest_tokens or table.max_model_len
        self._num_slots = sum(instance.capacity.max_num_seqs for instance in self._dispatcher.ready())
        self._wake()

    def _refusal(self, arrival: Arrival) -> str:
        total_tokens = arrival.prompt_tokens + arrival.output_tokens
        if self._max_model_len and total_tokens > self._max_model_len:
            return f"it may grow to {total_tokens} tokens, and the widest shape holds {self._max_model_len}"
        if self._limits.max_queued_requests is not None:
            load = IngressLoad(
                num_in_flight=len(self._records),
                num_slots=self._num_slots,
                num_ingresses=1,
                max_queued=self._limits.max_queued_requests,
                finished_per_s=0.0,
            )
            if admit(load, 1).refusal is not None:
                return "all slots and the queue were full"
        return ""

    # Words of instances -----------------------------------------------------------------------------------------------

    def ended(self, requests: Collection[LiveRequest]) -> None:
        """Records the end of requests that have their last token."""
        for request in requests:
            self._forget(self._records[request])
            self._on_end(request, "")

    def moved(self, requests: Sequence[LiveRequest], to: InstanceKey | None, *, carried: bool) -> None:
        """Follows requests that left their instance: with their KV to `to`, or sent again, to `to` where that fits."""
        if carried:
            assert to is not None, "a carried request has an instance that it goes to"
            for request in requests:
                request.num_moves += 1
                self._put(request, to)
            return
        # An instance puts what has run already before all that waits there, so the last one sent is served first.
        new = [request for request in requests if not request.num_generated]
        begun = [request for request in requests if request.num_generated]
        for request in (*new, *reversed(begun)):
            self._send_again(self._records[request], to)

    def lost(self, key: InstanceKey, requests: Sequence[LiveRequest]) -> None:
        """Resumes a lost instance's requests from their tokens. A request that lost too many instances fails."""
        for request in reversed(requests):  # each goes to the head of the queue where none takes it now
            record = self._records[request]
            self._put(request, None)
            record.note_progress()
            record.num_losses += 1
            record.num_losses_in_place += 1
            limits = self._limits
            if record.num_losses > limits.max_losses or record.num_losses_in_place > limits.max_losses_in_place:
                self._fail(record, f"{record.num_losses} instances were lost under it")
            else:
                self._place_or_wait(record, first=True)

    def touched(self, key: InstanceKey) -> None:
        """Sends waiting requests anew: `key` is up, gone, or of another shape."""
        self._dispatcher.touch(key)
        self._wake()

    def stepped(self, key: InstanceKey) -> None:
        """A step has ended there: its load is another."""
        self._dispatcher.touch(key)

    # What the controller hears ----------------------------------------------------------------------------------------

    def demand(self) -> Demand:
        """What the requests in flight want, for the planners."""
        longest = 0
        if self._waiting:
            held = max((i.max_tokens for i in self._dispatcher.ready()), default=0)
            longest = max(self._total_tokens(record.request) for record in self._waiting)
            longest = longest if longest > held else 0
        return Demand(
            num_running=len(self._records) - len(self._waiting),
            num_waiting=len(self._waiting),
            longest_waiting_tokens=longest,
            wanted_degrees=tuple(sorted((degree, count) for degree, count in self._wanted.items() if count)),
            num_priority=len(self._urgent),
        )

    # Placing ----------------------------------------------------------------------------------------------------------

    def _send_again(self, record: _Record, to: InstanceKey | None) -> None:
        """A switch left it to us: it goes to `to` where that fits, or to any other than where it was."""
        came_from = record.request.at
        record.request.num_moves += 1
        self._put(record.request, None)
        record.note_progress()
        record.num_redirects_in_place += 1
        is_patient = record.num_redirects_in_place > MAX_REDIRECTS_IN_PLACE
        first = bool(record.request.num_generated)
        self._place_or_wait(record, first=first, to=to, avoid=came_from, is_patient=is_patient)

    def _place_or_wait(
        self,
        record: _Record,
        *,
        first: bool,
        to: InstanceKey | None = None,
        avoid: InstanceKey | None = None,
        is_patient: bool = False,
    ) -> None:
        if not is_patient and self._place(record, to, avoid):
            return
        record.waiting_since_s = _now_s()
        if first:  # what has begun goes before what has not
            self._waiting.appendleft(record)
        else:
            self._waiting.append(record)
        if self._tending is None:
            self._tending = asyncio.get_running_loop().call_later(PLACE_PERIOD_S, self._tend)

    def _place(self, record: _Record, to: InstanceKey | None = None, avoid: InstanceKey | None = None) -> bool:
        instance = self._choose(record, to, avoid)
        if instance is None:
            return False
        self._put(record.request, instance.key)
        self._dispatcher.sent(record.request, instance.key)
        instance.add(record.request)
        self._dispatcher.touch(instance.key)
        return True

    def _choose(self, record: _Record, to: InstanceKey | None, avoid: InstanceKey | None) -> SimInstance | None:
        request = record.request
        total_tokens = self._total_tokens(request)
        named = self._cluster.instances.get(to) if to is not None else None
        if named is not None and named.is_alive and named.max_tokens >= total_tokens:
            return named
        options = DispatchOptions(
            degree=request.arrival.degree, total_tokens=total_tokens, is_priority=request.arrival.priority < 0
        )
        key = self._dispatcher.choose(request, options, avoid)
        # A wish is worth a wait, for the controller to form the group; but it never fails a request.
        is_patient = _now_s() - record.created_s < self._limits.parallelism_wait_s
        if key is None and options.degree is not None and not is_patient:
            key = self._dispatcher.choose(request, replace(options, degree=None), avoid)
        return self._cluster.instances[key] if key is not None else None

    def _total_tokens(self, request: LiveRequest) -> int:
        """Tokens it may grow to: clients say how many at most, and here they take them all."""
        total = request.arrival.prompt_tokens + request.arrival.output_tokens
        return max(request.num_tokens, min(total, self._max_model_len or total))

    def _put(self, request: LiveRequest, key: InstanceKey | None) -> None:
        """It is there now, or nowhere."""
        if request in self._urgent:
            for at, change in ((request.at, -1), (key, 1)):
                if at is not None:
                    self._dispatcher.count_urgent(at, change)
        request.at = key

    def _wake(self) -> None:
        """Tries soon to place what waits."""
        if self._waiting:
            if self._tending is not None:
                self._tending.cancel()
            self._tending = asyncio.get_running_loop().call_soon(self._tend)

    def _tend(self) -> None:
        """Tries to place what waits, and gives up what waited too long."""
        self._tending, now_s = None, _now_s()
        # The more urgent first; the order stays otherwise.
        waiting = sorted(self._waiting, key=lambda record: record.request.arrival.priority)
        self._waiting = deque()
        for record in waiting:
            if self._place(record):
                continue
            if now_s - record.waiting_since_s > self._limits.no_instance_timeout_s:
                self._fail(record, "no instance could take it in time")
            else:
                self._waiting.append(record)
        if self._waiting and self._tending is None:
            self._tending = asyncio.get_running_loop().call_later(PLACE_PERIOD_S, self._tend)

    def _fail(self, record: _Record, why: str) -> None:
        self._forget(record)
        self._on_end(record.request, why)

    def _forget(self, record: _Record) -> None:
        request = record.request
        del self._records[request]
        self._put(request, None)
        self._urgent.discard(request)
        if request.arrival.degree is not None:
            self._wanted[request.arrival.degree] -= 1


def _now_s() -> float:
    return asyncio.get_running_loop().time()
