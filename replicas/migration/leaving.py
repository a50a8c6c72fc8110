"""Requests that go from this instance to others: the source's side of migrations, one request at a time.

offered --Ready--> copying --full blocks sent--> (copying) ... --little is left--> held --Taken--> gone

A request is served here until it is held, at a step boundary, and again if the target cannot take it.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from pengserve.planners.types.errors import EngineError, LinkLostError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.orders import Migrate
from pengserve.replicas.engine.handoff import can_carry
from pengserve.replicas.engine.vllm_seam import Request, RequestStatus
from pengserve.replicas.kv.channel import PeerChannel
from pengserve.replicas.kv.rows import BlockRows
from pengserve.replicas.kv.transfer import Segment, Transfer, TransferPlan
from pengserve.replicas.migration.messages import Cancel, Copy, Offer, Tail, Word
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Member

logger = logging.getLogger(__name__)

SOURCE, TARGET = 0, 1  # ranks of the two in a transfer
MAX_COPIES = 8  # of one request, before the last one: a request that fills blocks faster than they are sent must end
FEW_BLOCKS = 1  # that may be sent while the request stands still, besides the one it is filling
SPARE_BLOCKS = 2  # that the target reserves for what the request fills while it is copied

Say = Callable[[InstanceKey, int, Word], None]
SendPiece = Callable[[InstanceKey, int, list], None]


class Phase(Enum):
    """How far a migration is."""

    OFFERED = auto()
    COPYING = auto()
    COPIED = auto()  # what was to be sent beside the steps has been: the next step boundary goes on
    HELD = auto()


@dataclass(eq=False)
class Leaving:
    """One request on its way."""

    number: int
    order: Migrate
    request: Request
    phase: Phase = Phase.OFFERED
    since_s: float = field(default_factory=time.monotonic)  # when it entered its phase
    blocks: list[int] = field(default_factory=list)  # those sent so far
    num_copies: int = 0
    transfer: Transfer | None = None

    def enter(self, phase: Phase) -> None:
        """Goes on to `phase`."""
        self.phase, self.since_s = phase, time.monotonic()


class Departures:
    """Belongs to the step thread. `on_end(leaving, has_left)` is called once for each that was begun."""

    def __init__(
        self, member: Member, say: Say, send_piece: SendPiece, on_end: Callable[[Leaving, bool], None]
    ) -> None:
        self._member, self._say, self._send_piece, self._on_end = member, say, send_piece, on_end
        self._lane = member.lanes.dp
        self._next_number = 0
        self.current: Leaving | None = None

    def begin(self, order: Migrate, request: Request) -> bool:
        """Offers a running request to the order's target; False where its ingress has gone."""
        handoff = self._member.owner.handoff(request)
        if handoff is None:
            return False
        self._next_number += 1
        leaving = self.current = Leaving(self._next_number, order, request)
        spare = SPARE_BLOCKS * self._lane.capacity.block_size
        limit = min(request.num_prompt_tokens + request.max_tokens, self._lane.capacity.max_model_len)
        num_tokens = max(request.num_computed_tokens, min(request.num_tokens + spare, limit))
        self._tell(leaving, Offer(handoff=handoff, num_tokens=num_tokens))
        reached("offered")
        return True

    def on_ready(self, leaving: Leaving) -> None:
        """The target has room."""
        if leaving.phase is Phase.OFFERED:
            leaving.enter(Phase.COPIED)
            self.boundary()

    def boundary(self) -> None:
        """Between two steps: the next copy, or the last one, where it is due."""
        leaving = self.current
        if leaving is None or leaving.phase is Phase.HELD:
            return
        if not self._is_here(leaving):
            self.give_up("the request has ended, or has given up its KV")
        elif leaving.phase is Phase.COPIED:
            self._copy(leaving)

    def _copy(self, leaving: Leaving) -> None:
        request, first = leaving.request, len(leaving.blocks)
        num_full = request.num_computed_tokens // self._lane.capacity.block_size
        is_last = num_full - first <= FEW_BLOCKS or leaving.num_copies == MAX_COPIES
        stop = self._lane.blocks_for(request.num_computed_tokens) if is_last else num_full
        blocks = self._lane.block_ids(request.request_id)[first:stop]
        leaving.blocks += blocks
        leaving.num_copies += 1
        if blocks:
            self._tell(leaving, Copy(first=first, count=len(blocks)))
            leaving.transfer = self._submit(leaving, blocks, is_last)
        if is_last:
            self._hold(leaving)
        else:
            reached("copying")

    def _submit(self, leaving: Leaving, blocks: list[int], is_last: bool) -> Transfer:
        """The transfer of these blocks; of the last ones, when it has ended."""
        transfers, target, number = self._member.lanes.transfers, leaving.order.target, leaving.number
        plan = TransferPlan(
            lane=self._lane.shape,
            what="KV",
            rank=SOURCE,
            outgoing=[Segment(TARGET, 0, BlockRows(self._member.lanes.dp_view(), blocks))],
            incoming=(),
            on_done=lambda: None if is_last else leaving.enter(Phase.COPIED),
            on_failed=lambda error: self._failed(leaving, error),
        )
        channel = PeerChannel(lambda _, parts: self._send_piece(target, number, list(parts)))
        leaving.enter(Phase.COPYING)
        transfer = transfers.submit(plan, channel)
        if is_last:
            reached("tail")
            transfers.run(transfer)
        return transfer

    def _hold(self, leaving: Leaving) -> None:
        request = leaving.request
        # From here on this scheduler and the target's must not both go on with it.
        self._lane.hold(request)
        leaving.enter(Phase.HELD)
        tokens = list(request.output_token_ids)
        self._tell(leaving, Tail(output_token_ids=tokens, num_computed_tokens=request.num_computed_tokens))
        reached("held")

    def on_taken(self, leaving: Leaving) -> None:
        """The request goes on at the target."""
        if leaving.phase is not Phase.HELD:
            return
        request_id = leaving.request.request_id
        self._member.lanes.num_migrated += 1
        if self._lane.knows(request_id):
            self._lane.release([request_id])
        self._member.owner.moved([request_id], leaving.order.target, carried=True)
        self._end(leaving, has_left=True)

    def stay(self, why: str) -> None:
        """The request is not taken, and goes on here."""
        leaving = self.current
        assert leaving is not None
        logger.debug("request %s stays: %s", leaving.request.request_id, why)
        if leaving.phase is Phase.HELD and self._lane.knows(leaving.request.request_id):
            self._lane.go_on(leaving.request)
        self._end(leaving, has_left=False)

    def give_up(self, why: str) -> None:
        """Ends the migration from this side. A request that the target may have taken is sent again from its tokens."""
        leaving = self.current
        if leaving is None:
            return
        try:
            self._say(leaving.order.target, leaving.number, Cancel(why=why))
        except LinkLostError:
            logger.debug("instance %s is gone and is not told that a migration ends", leaving.order.target)
        if leaving.phase is not Phase.HELD:
            self.stay(why)
            return
        request_id = leaving.request.request_id
        self._lane.release([request_id])
        self._member.owner.moved([request_id], None, carried=False)
        self._end(leaving, has_left=True)

    def check_time(self, timeout_s: float) -> None:
        """Gives up what the target has not answered for so long."""
        leaving = self.current
        is_waiting = leaving is not None and leaving.phase in (Phase.OFFERED, Phase.HELD)
        if leaving is not None and is_waiting and time.monotonic() - leaving.since_s > timeout_s:
            self.give_up(f"instance {leaving.order.target} gave no answer within {timeout_s:g} s")

    def _is_here(self, leaving: Leaving) -> bool:
        """Whether the request runs, with the very blocks that have been sent. A preemption shows at once."""
        request = leaving.request
        return (
            self._lane.knows(request.request_id)
            and self._lane.request(request.request_id) is request
            and request.status is RequestStatus.RUNNING
            and can_carry(request)
        )

    def _tell(self, leaving: Leaving, word: Word) -> None:
        self._say(leaving.order.target, leaving.number, word)

    def _failed(self, leaving: Leaving, error: Exception) -> None:
        if self.current is leaving:
            self.give_up(str(EngineError(error)))

    def _end(self, leaving: Leaving, *, has_left: bool) -> None:
        self.current = None
        if leaving.transfer is not None:
            self._member.lanes.transfers.cancel(leaving.transfer)
        self._on_end(leaving, has_left)
