"""What the ingress remembers of every running request, so that it survives the death of any instance.

    waiting --place--> on a link --last output--> forgotten
       ^                   |
       +----- link lost ---+        (with the output tokens received so far: they are resumed, never sampled again)

A record belongs to at most one link at a time. Outputs that come over any other link are from an earlier life of the
request and are dropped.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

import msgspec

from pengserve.cluster.ingress.config import LimitConfig
from pengserve.cluster.ingress.dispatcher import Dispatcher
from pengserve.cluster.ingress.vllm_openai_seam import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    GenerationError,
    RetryableRequestError,
)
from pengserve.planners.types.errors import LinkLostError
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.engine.link import InstanceLink

logger = logging.getLogger(__name__)

PLACE_PERIOD_S = 0.25  # how often waiting requests are tried again and their time-outs checked


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One sequence that an instance generates, or will."""

    request: EngineCoreRequest
    output_token_ids: list[int] = field(default_factory=list)
    link: InstanceLink | None = None  # None: waits for an instance
    num_losses: int = 0
    num_losses_in_place: int = 0  # in a row without a new token
    waiting_since_s: float = 0.0
    lost_since_s: float | None = None  # until the first token after a loss

    @property
    def num_tokens(self) -> int:
        """Tokens of KV it needs at once: the prompt and what was generated."""
        prompt = self.request.prompt_token_ids
        num_prompt = len(prompt) if prompt is not None else len(self.request.prompt_embeds)
        return num_prompt + len(self.output_token_ids)


class RecordEvents(Protocol):
    """Who hears what becomes of records. Called in the event loop; must not wait."""

    def on_failed(self, request_id: str, error: Exception) -> None:
        """The request is given up."""

    def on_finished(self, output: EngineCoreOutput) -> None:
        """The request turned out to be complete when its instance died; `output` says so."""

    def on_dispatched(self, key: InstanceKey, num_resumed_tokens: int | None) -> None:
        """A request went to an instance; with the number of output tokens it brought, where it was resumed."""

    def on_resumed(self, gap_s: float) -> None:
        """The first token after a loss came, `gap_s` after it."""


class RequestBook:
    """All records of one ingress. Everything runs in one event loop; only `run` waits."""

    def __init__(
        self,
        events: RecordEvents,
        limits: LimitConfig,
        ready_links: Callable[[], Sequence[InstanceLink]],
        discard_link: Callable[[InstanceLink], None],
        max_model_len: Callable[[], int],
    ) -> None:
        self._events, self._limits = events, limits
        self._ready_links, self._discard_link, self._max_model_len = ready_links, discard_link, max_model_len
        self._dispatcher = Dispatcher()
        self._records: dict[str, RequestRecord] = {}
        self._waiting: deque[RequestRecord] = deque()
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_waiting(self) -> int:
        """Requests without an instance."""
        return len(self._waiting)

    def add(self, request: EngineCoreRequest) -> None:
        """Takes a request and sends it to an instance, now or as soon as there is one."""
        record = RequestRecord(request)
        self._records[request.request_id] = record
        self._place_or_wait(record, first=False)

    def accept(self, link: InstanceLink, outputs: Iterable[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Notes the new tokens of a batch; returns the outputs that count, in order."""
        accepted = []
        for output in outputs:
            record = self._records.get(output.request_id)
            if record is None or record.link is not link:
                continue
            if output.new_token_ids:
                record.output_token_ids.extend(output.new_token_ids)
                record.num_losses_in_place = 0
                if record.lost_since_s is not None:
                    self._events.on_resumed(monotonic() - record.lost_since_s)
                    record.lost_since_s = None
            if output.finish_reason is not None:
                del self._records[output.request_id]
            accepted.append(output)
        return accepted

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forgets requests and tells their instances."""
        by_link: dict[InstanceLink, list[str]] = {}
        for request_id in request_ids:
            record = self._records.pop(request_id, None)
            if record is not None and record.link is not None:
                by_link.setdefault(record.link, []).append(request_id)
        for link, ids in by_link.items():
            link.abort(ids)

    def lose(self, link: InstanceLink) -> None:
        """`link` is gone: everything that ran over it is resumed elsewhere, the oldest first."""
        self._dispatcher.forget(link.key)
        now_s = monotonic()
        lost = [record for record in self._records.values() if record.link is link]
        for record in reversed(lost):  # each goes to the head of the queue where none takes it now
            record.link = None
            record.num_losses += 1
            record.num_losses_in_place += 1
            if record.lost_since_s is None:
                record.lost_since_s = now_s
            if not self._finish_if_complete(record) and not self._give_up_if_poisonous(record):
                self._place_or_wait(record, first=True)
        if lost:
            logger.info("instance %s is gone; %d requests go on elsewhere", link.key, len(lost))

    def is_busy(self, link: InstanceLink) -> bool:
        """Whether a request runs over `link`."""
        return any(record.link is link for record in self._records.values())

    def wake(self) -> None:
        """An instance may have become ready."""
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
            self._place_waiting()

    def _place_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        now_s = monotonic()
        while waiting:
            record = waiting.popleft()
            if self._records.get(record.request.request_id) is not record:
                continue  # aborted while it waited
            if self._place(record):
                continue
            if now_s - record.waiting_since_s > self._limits.no_instance_timeout_s:
                self._fail(record, RetryableRequestError("No instance became ready in time. Try again later."))
            else:
                self._waiting.append(record)

    def _place_or_wait(self, record: RequestRecord, *, first: bool) -> None:
        if self._place(record):
            return
        record.waiting_since_s = monotonic()
        # What already runs goes before what has not begun.
        if first:
            self._waiting.appendleft(record)
        else:
            self._waiting.append(record)

    def _place(self, record: RequestRecord) -> bool:
        """Sends `record` to the best instance; False where none takes it now. A failed record counts as placed."""
        while True:
            link = self._dispatcher.choose(self._ready_links(), record.num_tokens)
            if link is None:
                return False
            try:
                link.add(_resumable(record), record.output_token_ids)
            except LinkLostError:
                self._discard_link(link)
                continue
            except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
                logger.exception("request %s cannot be sent", record.request.request_id)
                self._fail(record, GenerationError())
                return True
            record.link = link
            self._dispatcher.sent(link, record.num_tokens)
            resumed = len(record.output_token_ids) if record.num_losses else None
            self._events.on_dispatched(link.key, resumed)
            return True

    def _finish_if_complete(self, record: RequestRecord) -> bool:
        """A request whose last allowed token has arrived needs no instance any more."""
        params = record.request.sampling_params
        num_output = len(record.output_token_ids)
        at_limit = params is not None and params.max_tokens is not None and num_output >= params.max_tokens
        if not at_limit and record.num_tokens < self._max_model_len():
            return False
        request_id = record.request.request_id
        del self._records[request_id]
        self._events.on_finished(
            EngineCoreOutput(request_id=request_id, new_token_ids=[], finish_reason=FinishReason.LENGTH)
        )
        return True

    def _give_up_if_poisonous(self, record: RequestRecord) -> bool:
        """A request under which instance after instance dies is not worth the next one."""
        limits = self._limits
        if record.num_losses <= limits.max_losses and record.num_losses_in_place <= limits.max_losses_in_place:
            return False
        logger.error(
            "request %s is given up: %d instances were lost under it", record.request.request_id, record.num_losses
        )
        self._fail(record, GenerationError())
        return True

    def _fail(self, record: RequestRecord, error: Exception) -> None:
        self._records.pop(record.request.request_id, None)
        self._events.on_failed(record.request.request_id, error)


def _resumable(record: RequestRecord) -> EngineCoreRequest:
    """The request as the next instance must see it: prompt logprobs came with the first token, once."""
    request = record.request
    params = request.sampling_params
    if record.output_token_ids and params is not None and params.prompt_logprobs is not None:
        params = params.clone()
        params.prompt_logprobs = None
        request = msgspec.structs.replace(request, sampling_params=params)
        record.request = request
    return request
