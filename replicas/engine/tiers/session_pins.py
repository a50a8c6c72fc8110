"""KV of conversations that is kept for a while after an answer, so that the next turn finds it.

vLLM keeps the blocks of ended requests as cached prefixes, and hands out the least recently used first. A pin keeps the
blocks of a session's newest answer from being handed out: for a bounded time, for a bounded share of all blocks, and
never where a request needs them.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from pengserve.planners.types.contract import Contract
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.vllm_seam import EngineCoreOutputs, Request

MAX_SHARE = 0.5  # of the scheduler's blocks, that all pins have together

Session = tuple[str, str]  # tenant, and name of its session


class Contracts(Protocol):
    """Who knows the contracts of requests: `replicas/open_requests.py`."""

    def contract(self, request_id: str) -> Contract:
        """What holds for a request."""


class SessionPins:
    """Belongs to the step thread."""

    def __init__(
        self,
        scheduler: SchedulerHandle,
        contracts: Contracts,
        pin_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pin_s`: seconds that a pin lasts from the end of an answer."""
        self._scheduler, self._contracts, self._pin_s, self._clock = scheduler, contracts, pin_s, clock
        self._requests: dict[str, tuple[Session, Request]] = {}  # of sessions, that have not ended
        self._pins: OrderedDict[Session, tuple[float, list[int]]] = OrderedDict()  # until when; the oldest first
        self._holds: Counter[int] = Counter()  # pins of each block

    def began(self, request: Request) -> None:
        """A request came."""
        contract = self._contracts.contract(request.request_id)
        if contract.session:
            self._requests[request.request_id] = ((contract.tenant, contract.session), request)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests have left without an answer."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def ended(self, batches: Iterable[EngineCoreOutputs]) -> None:
        """After a step: requests that have ended in it leave their KV to their sessions."""
        if not self._requests:
            return
        for batch in batches:
            for output in batch.outputs:
                if output.finish_reason is not None and output.request_id in self._requests:
                    self._pin(*self._requests.pop(output.request_id))

    def make_room(self, num_blocks: int) -> None:
        """Before a step: pins whose time is over end, and as many others as keep the step from so many free blocks."""
        now_s = self._clock()
        while self._pins:
            until_s, _ = next(iter(self._pins.values()))
            if until_s > now_s and self._scheduler.num_free() >= num_blocks:
                return
            self._end(next(iter(self._pins)))

    def end_all(self) -> None:
        """No block is pinned any more."""
        while self._pins:
            self._end(next(iter(self._pins)))

    @property
    def num_sessions(self) -> int:
        """Sessions that have pinned blocks."""
        return len(self._pins)

    def num_blocks(self) -> int:
        """Pinned blocks that no request holds: free, but for the pins."""
        return self._scheduler.num_held_alone(self._holds) if self._pins else 0

    def _pin(self, session: Session, request: Request) -> None:
        blocks = self._scheduler.pin(request.block_hashes)
        if session in self._pins:
            self._end(session)
        self._pins[session] = (self._clock() + self._pin_s, blocks)
        self._holds.update(blocks)
        while len(self._holds) > MAX_SHARE * self._scheduler.num_blocks:
            self._end(next(iter(self._pins)))

    def _end(self, session: Session) -> None:
        _, blocks = self._pins.pop(session)
        self._holds.subtract(blocks)
        for block in blocks:
            if not self._holds[block]:
                del self._holds[block]
        self._scheduler.unpin(blocks)
