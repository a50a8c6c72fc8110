"""What the ingress remembers of every running request, so that it survives switches and the death of any instance.

    waiting --place--> on a link --last output--> forgotten
       ^                 |    |
       |                 |    +-- MOVED, carried --> on the other link (with its KV; nothing is computed again)
       +-- link lost ----+
       +-- MOVED, not carried

A request that goes back to waiting is sent again with the output tokens received so far: they are never sampled again.

Each time a record is sent it is another copy of the request; `copies.py` says which one counts.

Of the requests on an instance when it dies, any may have killed it: `trials.py` finds out which, and the book gives
that one up.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

import msgspec

from pengserve.cluster.ingress.config import LimitConfig
from pengserve.cluster.ingress.in_flight.begin_order import BeginOrder
from pengserve.cluster.ingress.in_flight.copies import Copies
from pengserve.cluster.ingress.in_flight.placing import Placing
from pengserve.cluster.ingress.in_flight.quarantine import PoisonousRequestError, Quarantine
from pengserve.cluster.ingress.in_flight.told import Told
from pengserve.cluster.ingress.in_flight.trials import Trials
from pengserve.cluster.ingress.request.kept import KeptSequence
from pengserve.cluster.ingress.request.moves import RequestMove
from pengserve.cluster.ingress.request.record import Links, RecordEvents, RequestRecord, Resumption
from pengserve.cluster.ingress.request.request_options import NO_OPTIONS, RequestOptions
from pengserve.cluster.ingress.routing.prefixes import Prefixes
from pengserve.cluster.ingress.slo.expected_lengths import ExpectedLengths
from pengserve.cluster.ingress.slo.queue_limits import QueueLimits
from pengserve.cluster.ingress.slo.reject import queue_timeout
from pengserve.cluster.ingress.tenants.fair_queue import FairQueue
from pengserve.cluster.ingress.vllm_openai_seam import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    GenerationError,
    RetryableRequestError,
)
from pengserve.planners.types.errors import LinkLostError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.snapshot import Demand
from pengserve.replicas.engine.link import InstanceLink, Moved, Paused, Trial

logger = logging.getLogger(__name__)

SUPERSEDED_WAIT_S = 5.0  # for a link that comes back, where no new instance will come
PLACE_PERIOD_S = 0.25  # how often waiting requests are tried again and their time-outs checked
MAX_REDIRECTS_IN_PLACE = 8  # in a row without a new token; more of them wait a period each


class RequestBook:
    """All records of one ingress. Everything runs in one event loop; only `run` waits."""

    def __init__(
        self,
        events: RecordEvents,
        limits: LimitConfig,
        links: Links,
        max_model_len: Callable[[], int],
        clock: Callable[[], float] = monotonic,
        is_superseded: Callable[[], bool] = lambda: False,
        *,
        is_only_ingress: bool = True,
        secret: str = "",
        fair: FairQueue | None = None,
    ) -> None:
        """
        Args:
            max_model_len: tokens that the widest group this cluster can form holds for one request.
            is_superseded: whether another configuration has taken over, so that no instance will come any more.
            is_only_ingress: whether no other ingress sends requests to these instances.
            secret: the cluster's own, with which prompts are hashed.
            fair: orders requests by their tenants' shares; None: they begin as they come.
        """
        self._is_superseded = is_superseded
        self._events, self._limits, self._links, self._max_model_len = Told(events), limits, links, max_model_len
        self._clock = clock
        self._records: dict[str, RequestRecord] = {}  # by request id
        self._copies = Copies(links, clock)
        self._trials = Trials(limits.max_deaths_alone, is_only_ingress=is_only_ingress)
        prefixes = Prefixes(limits.max_prefix_entries, secret, is_only_ingress=is_only_ingress)
        queued_before = fair.queued_before if fair is not None else None
        self._placing = Placing(limits, links, self._trials, max_model_len, clock, prefixes, queued_before)
        self._order = BeginOrder(fair, self._placing.urgent)
        self._quarantine = Quarantine(clock)
        self._expected = ExpectedLengths()
        self._waiting: deque[RequestRecord] = deque()
        self._queue_limits = QueueLimits()
        self._wake = asyncio.Event()
        self.used = asyncio.Event()  # a request came; the task that waits for it clears it

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_waiting(self) -> int:
        """Requests without an instance."""
        return len(self._waiting)

    def add(
        self, request: EngineCoreRequest, options: RequestOptions = NO_OPTIONS, kept: KeptSequence | None = None
    ) -> None:
        """Takes a request and sends it to an instance, now or as soon as there is one. Tells `kept` of its tokens."""
        record = RequestRecord(request, options, created_s=self._clock(), kept=kept)
        self._records[request.request_id] = record
        self._queue_limits.come(record)
        self.used.set()
        self._order.come(record)
        self._place_or_wait(record, first=False)

    def check(self, request: EngineCoreRequest, options: RequestOptions = NO_OPTIONS) -> None:
        """Refuses what is known to kill instances.

        Raises:
            PoisonousRequestError, KeyClosedError: for the client; another try is of no use.
        """
        self._quarantine.check(request, options.key_id)

    def predict_ttft_s(self, request: EngineCoreRequest, options: RequestOptions) -> float | None:
        """Seconds until the first token of a request that is not added yet; None where that is not known."""
        return self._placing.predict_ttft_s(RequestRecord(request, options, created_s=self._clock()))

    def accept(self, link: InstanceLink, outputs: Iterable[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Notes the new tokens of a batch; returns the outputs that count, in order, under their request ids."""
        accepted, copies, now_s = [], self._copies.records, self._clock()
        for output in outputs:
            record = copies.get(output.request_id)
            if record is None or record.link is not link:
                self._copies.take_stray(record, link, output)
                continue
            if output.events:
                record.num_recomputes += sum(event.type is EngineCoreEventType.PREEMPTED for event in output.events)
            if output.new_token_ids:
                record.output_token_ids.extend(output.new_token_ids)
                if record.is_unsettled:
                    self._settle(record, now_s)
                if record.trial_ends_at is not None and len(record.output_token_ids) >= record.trial_ends_at:
                    self._acquit(record)
                if record.last_token_s is None:
                    record.first_token_s = now_s
                    if output.prefill_stats is not None:
                        record.num_cached_tokens = output.prefill_stats.num_cached_tokens
                    if record.num_copies == 1:
                        self._placing.first_token(record, now_s - record.sent_s)
                    self._order.begun(record)
                record.last_token_s = now_s
                if record.kept is not None:
                    record.kept.add(len(output.new_token_ids), now_s)
            if record.num_copies > 1:
                output.request_id = record.request.request_id
            if output.finish_reason is not None:
                self._end(record, output)
            accepted.append(output)
        return accepted

    def move(self, link: InstanceLink, moved: Moved) -> list[EngineCoreOutput]:
        """Follows requests that left `link`; returns outputs that had come from where they are, now that they count."""
        accepted: list[EngineCoreOutput] = []
        redirected: list[tuple[RequestRecord, InstanceKey | None]] = []
        target = self._links.find(moved.to) if moved.to is not None else None
        move = RequestMove(moved.to, moved.carried)
        for wire_id in moved.request_ids:
            record = self._copies.records.get(wire_id)
            if record is None:
                if moved.carried and target is not None:
                    self._copies.abort_at(target, wire_id)
            elif record.link is not link:
                self._copies.take_stray(record, link, move)
            else:
                last = self._follow(record, move, accepted)
                if last is not None:
                    redirected.append((record, last.to))
        # An instance puts what has run already before all that waits there, so the last one sent is served first.
        redirected.sort(key=lambda pair: bool(pair[0].output_token_ids))
        num_new = sum(not record.output_token_ids for record, _ in redirected)
        for record, to in (*redirected[:num_new], *reversed(redirected[num_new:])):
            self._send_again(record, to=to, avoid=link)
        return accepted

    def note_trial(self, link: InstanceLink, trial: Trial) -> None:
        """The instance has let a suspect in: alone, or among others."""
        record = self._copies.records.get(trial.request_id)
        if record is not None and record.link is link:
            self._trials.told(record, is_alone=trial.is_alone)
            if not trial.is_alone:
                self._wake.set()  # the next suspect's turn

    def note_pause(self, link: InstanceLink, paused: Paused) -> None:
        """A request was parked on an instance for a while: one on which it is, or has been."""
        record = self._copies.records.get(paused.request_id)
        if record is None:
            return
        record.num_parks += 1
        record.swapped_bytes += paused.swapped_bytes
        if record.kept is not None:
            record.kept.paused_s += paused.seconds

    def abort(self, request_ids: Iterable[str], finish: str = "abort") -> None:
        """Forgets requests and tells their instances. `finish` is how they ended for their clients."""
        on_instances = []
        for request_id in request_ids:
            record = self._records.pop(request_id, None)
            if record is None:
                continue
            self._tell_end(record, finish)
            if record.link is not None:
                self._placing.ended(record)
                self._trials.leave(record)
                on_instances.append(record)
        self._copies.abort(on_instances)

    def lose(self, link: InstanceLink, *, is_death: bool = True) -> None:
        """`link` is gone: everything that ran over it is resumed elsewhere, the oldest first.

        `is_death` is False where the instance left as it was told to.
        """
        self._placing.forget(link.key)
        lost = sorted(self._copies.lose(link), key=lambda record: record.created_s)
        if is_death:
            self._trials.instance_died(link, lost)
        why = "drained" if self._links.is_leaving(link.key) else "lost"
        for record in reversed(lost):  # each goes to the head of the queue where none takes it now
            self._resume(record, why)
        if lost:
            logger.info("instance %s is gone; %d requests go on elsewhere", link.key, len(lost))

    def is_busy(self, link: InstanceLink) -> bool:
        """Whether a request runs over `link`, or may be about to."""
        return self._copies.is_busy(link)

    def note_shape(self, link: InstanceLink, shape: str) -> None:
        """`link` runs another shape now, and its requests with it."""
        for record in self._records.values():
            if record.link is link:
                record.note(self._clock(), f"shape {shape}", link.key)

    def demand(self) -> Demand:
        """What the requests in flight want, for the planners."""
        return self._placing.demand(self._records.values())

    def records(self) -> list[RequestRecord]:
        """All requests in flight here."""
        return list(self._records.values())

    def prioritize(self, record: RequestRecord, priority: int) -> None:
        """A request has another priority from now on, also on its instance."""
        self._order.prioritize(record, priority)

    def wake(self) -> None:
        """An instance may have become ready, or changed its shape."""
        self._wake.set()

    async def run(self) -> None:
        """Places waiting requests and enforces their time-out, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(PLACE_PERIOD_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            self.tend()

    def tend(self) -> None:
        """Tries to place what waits, and gives up what waited too long."""
        now_s = self._clock()
        for record in self._copies.overdue(now_s):
            logger.warning("request %s goes on elsewhere: no word came of where it moved", record.wire_id)
            self._resume(record)
        for record, limit_s in self._queue_limits.take_late(now_s, self._has):
            if record.link is not None:
                self._copies.abort_at(record.link, record.wire_id)
            self._fail(record, queue_timeout(limit_s))
        self._order.tend(self._links)
        waiting = sorted(self._waiting, key=self._order.place)
        self._waiting = deque()
        for record in waiting:
            if not self._has(record):
                continue  # aborted while it waited
            if record.verdict_at_s is not None:
                if now_s < record.verdict_at_s:
                    self._waiting.append(record)
                    continue
                record.verdict_at_s = None
                if self._trials.is_guilty(record):
                    self._condemn(record)
                    continue
            if self._place(record):
                continue
            waited_s = now_s - record.waiting_since_s
            if waited_s > SUPERSEDED_WAIT_S and self._is_superseded() and not self._links.ready():
                self._fail(record, RetryableRequestError("The server has another configuration now. Try again."))
            elif waited_s > self._limits.no_instance_timeout_s:
                self._fail(record, RetryableRequestError("No instance became ready in time. Try again later."))
            else:
                self._waiting.append(record)

    def _has(self, record: RequestRecord) -> bool:
        return self._records.get(record.request.request_id) is record

    # Moves and losses ------------------------------------------------------------------------------------------

    def _follow(self, record: RequestRecord, move: RequestMove, accepted: list[EngineCoreOutput]) -> RequestMove | None:
        """Leads `record` along `move` and those that follow in its stash; the last one where it was not carried."""
        while True:
            if not move.carried:
                return move
            assert move.to is not None, "a request is carried to an instance"
            link = self._copies.carry(record, move.to)
            if link is None:
                self._resume(record)
                return None
            self._events.on_request_moved(carried=True)
            record.is_unsettled = True
            record.note(self._clock(), "carried", link.key)
            self._trials.told(record, is_alone=False)
            if record.stash is None:
                return None
            outputs, next_move = record.stash.take(link)
            accepted += self.accept(link, outputs)
            if next_move is None or record.link is not link:  # it ended, or was sent again, with these outputs
                if record.stash is not None and not record.stash.num_events:
                    record.stash = None
                return None
            move = next_move

    def _send_again(self, record: RequestRecord, *, to: InstanceKey | None, avoid: InstanceLink | None) -> None:
        """A switch left `record` to us: it goes to `to` where that fits, or to any other than `avoid`."""
        if record.link is not None:
            record.note(self._clock(), "handed back", record.link.key)
        self._drop_copy(record)
        record.is_unsettled = True
        record.num_redirects_in_place += 1
        self._events.on_request_moved(carried=False)
        if avoid is not None and record.output_token_ids and self._links.is_leaving(avoid.key):
            record.resumed_why = "drained"
        if self._finish_if_complete(record):
            return
        is_patient = record.num_redirects_in_place > MAX_REDIRECTS_IN_PLACE
        self._place_or_wait(record, first=bool(record.output_token_ids), to=to, avoid=avoid, is_patient=is_patient)

    def _resume(self, record: RequestRecord, why: str = "lost") -> None:
        """The copy of `record` is lost."""
        if record.link is not None:
            record.note(self._clock(), "lost", record.link.key)
        self._drop_copy(record)
        record.num_losses += 1
        record.num_losses_in_place += 1
        record.is_unsettled, record.resumed_why = True, why
        if record.lost_since_s is None:
            record.lost_since_s = self._clock()
        if self._finish_if_complete(record) or self._give_up_if_hopeless(record):
            return
        if self._trials.is_guilty(record):
            record.verdict_at_s = self._clock() + self._limits.verdict_wait_s
        is_patient = record.num_suspected_deaths > 1  # `tend` knows whose turn it is
        self._place_or_wait(record, first=True, is_patient=is_patient)
        if is_patient:
            self._wake.set()

    def _drop_copy(self, record: RequestRecord) -> None:
        """Nothing that still comes of this copy counts."""
        self._trials.leave(record)
        self._copies.drop(record)

    def _settle(self, record: RequestRecord, now_s: float) -> None:
        """The first token after a switch or a loss is there."""
        record.is_unsettled = False
        record.num_losses_in_place = record.num_redirects_in_place = 0
        if record.lost_since_s is not None:
            self._events.on_resumed(now_s - record.lost_since_s)
            record.lost_since_s = None
        elif record.last_token_s is not None:
            self._events.on_switched(now_s - record.last_token_s)

    def _acquit(self, record: RequestRecord) -> None:
        """A suspect ran for long enough, or to its end."""
        self._trials.acquit(record)
        self._wake.set()  # the next suspect's turn

    def _end(self, record: RequestRecord, output: EngineCoreOutput) -> None:
        """`output` is the last of this copy, and of the request, if the copy did not end for want of room."""
        cut_short = (
            output.finish_reason is FinishReason.LENGTH
            and record.options.has_length
            and not record.is_at_limit
            and record.num_tokens < self._max_model_len()
            and record.num_redirects_in_place <= MAX_REDIRECTS_IN_PLACE
        )
        if cut_short:  # the shape it runs in holds no more of it, but another one does
            output.finish_reason = None
            self._send_again(record, to=None, avoid=None)
        else:
            if record in self._trials:
                self._acquit(record)
            self._placing.ended(record)
            self._forget(record, str(output.finish_reason))

    # Placing ---------------------------------------------------------------------------------------------------

    def _place_or_wait(
        self,
        record: RequestRecord,
        *,
        first: bool,
        to: InstanceKey | None = None,
        avoid: InstanceLink | None = None,
        is_patient: bool = False,
    ) -> None:
        if not is_patient and self._place(record, to=to, avoid=avoid):
            return
        record.waiting_since_s = self._clock()
        # What already runs goes before what has not begun.
        if first:
            self._waiting.appendleft(record)
        else:
            self._waiting.append(record)

    def _place(
        self, record: RequestRecord, *, to: InstanceKey | None = None, avoid: InstanceLink | None = None
    ) -> bool:
        """Sends `record` to the best instance; False where none takes it now. A failed record counts as placed."""
        while True:
            link = self._placing.choose(record, to=to, avoid=avoid)
            if link is None:
                return False
            try:
                self._send(record, link)
            except LinkLostError:
                self._links.discard(link)
                continue
            except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
                logger.exception("request %s cannot be sent", record.request.request_id)
                self._fail(record, GenerationError())
            return True

    def _send(self, record: RequestRecord, link: InstanceLink) -> None:
        """Sends a new copy.

        Raises:
            LinkLostError: the instance is gone.
        """
        request = record.next_copy()
        hit_tokens = self._placing.hit_tokens(link, record)
        link.add(
            request,
            record.output_token_ids,
            is_tried_alone=self._trials.is_tried_alone(record),
            predicted_hit_tokens=hit_tokens,
            contract=self._expected.contract_of(record, self._clock()),
        )
        self._copies.sent(record, link, request.request_id)
        record.sent_s, record.num_tokens_when_sent = self._clock(), len(record.output_token_ids)
        self._trials.begin(record)
        self._placing.sent(record, link, hit_tokens)
        why, record.resumed_why = record.resumed_why, ""
        record.note(record.sent_s, "resumed" if why else "sent", link.key)
        self._events.on_dispatched(link.key, Resumption(len(record.output_token_ids), why) if why else None)

    def _finish_if_complete(self, record: RequestRecord) -> bool:
        """A request whose last allowed token has arrived needs no instance any more."""
        if not record.is_at_limit and record.num_tokens < self._max_model_len():
            return False
        self._forget(record, "length")
        self._events.on_finished(
            EngineCoreOutput(request_id=record.request.request_id, new_token_ids=[], finish_reason=FinishReason.LENGTH)
        )
        return True

    def _give_up_if_hopeless(self, record: RequestRecord) -> bool:
        """A request under which instance after instance dies is given up, even if nothing points at it."""
        limits = self._limits
        if record.num_losses <= limits.max_losses and record.num_losses_in_place <= limits.max_losses_in_place:
            return False
        logger.error(
            "request %s is given up: %d instances were lost under it", record.request.request_id, record.num_losses
        )
        self._fail(record, GenerationError())
        return True

    def _condemn(self, record: RequestRecord) -> None:
        """`record` kills instances."""
        self._trials.condemned(record)
        self._quarantine.add(record.request, record.options.key_id)
        logger.error(
            "request %s is given up: it ends the instances that compute it, %d so far",
            record.request.request_id,
            record.num_losses,
        )
        self._fail(record, PoisonousRequestError())

    def _fail(self, record: RequestRecord, error: Exception) -> None:
        self._forget(record, "error")
        self._events.on_failed(record.request.request_id, error)

    def _forget(self, record: RequestRecord, finish: str) -> None:
        """It ended; copies it may have left behind are orphans."""
        if self._records.pop(record.request.request_id, None) is not None:
            self._tell_end(record, finish)
        if record.link is not None:
            self._drop_copy(record)

    def _tell_end(self, record: RequestRecord, finish: str) -> None:
        self._order.ended(record)
        self._expected.ended(record, finish)
        self._events.on_ended(record, finish)
