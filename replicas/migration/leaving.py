"""Requests that go from this instance to others: the source's side of migrations.

offered --Ready--> copying --full blocks sent--> (copying) ... --little is left--> held --Taken--> gone

A request is served here until it is held, at a step boundary, and again if the target cannot take it. Several are under
way at once. They share one pace of bytes beside the steps, and one for what is sent while a request stands still.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from pengserve.planners.types.errors import EngineError, LinkLostError, PengServeError, one_line
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.orders import Migrate
from pengserve.replicas.engine.handoff import can_carry
from pengserve.replicas.engine.vllm_seam import Request, RequestStatus
from pengserve.replicas.kv.channel import PeerChannel
from pengserve.replicas.kv.pacing import Pace
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
STEPS_AHEAD = 4  # of bytes that are under way: the link must not wait for the answer to an offer

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
    blocks: list[int] = field(default_factory=list)  # those of all copies so far
    num_sent: int = 0  # of these
    num_copies: int = 0
    transfer: Transfer | None = None

    def enter(self, phase: Phase) -> None:
        """Goes on to `phase`."""
        self.phase, self.since_s = phase, time.monotonic()


class Departures:
    """Belongs to the step thread. `on_end(leaving, has_left)` is called once for each that was begun.

    A fault of a migration ends that migration, never the instance.
    """

    def __init__(
        self, member: Member, say: Say, send_piece: SendPiece, on_end: Callable[[Leaving, bool], None]
    ) -> None:
        self._member, self._say, self._send_piece, self._on_end = member, say, send_piece, on_end
        self._lane = member.lanes.dp
        self._pace = Pace()  # of all copies: they go over the same connections, one piece a step
        self._stood_still_bytes = 0  # sent since the newest step, of requests that stood still meanwhile
        self._next_number = 0
        self._leaving: dict[int, Leaving] = {}  # by number, the oldest first

    def __len__(self) -> int:
        return len(self._leaving)

    def find(self, target: InstanceKey, number: int) -> Leaving | None:
        """The migration that `target` knows by this number; None where it has ended here."""
        leaving = self._leaving.get(number)
        return leaving if leaving is not None and leaving.order.target == target else None

    def request_ids(self) -> set[str]:
        """Requests that are under way."""
        return {leaving.request.request_id for leaving in self._leaving.values()}

    def has_room(self) -> bool:
        """Whether another request may be offered: what is under way is sent within `STEPS_AHEAD` steps."""
        unsent = sum(self._num_unsent(leaving) for leaving in self._leaving.values())
        return unsent * self._lane.capacity.bytes_per_block < STEPS_AHEAD * self._pace.num_bytes

    def _num_unsent(self, leaving: Leaving) -> int:
        """Blocks."""
        if leaving.phase is Phase.HELD:
            return 0
        return self._lane.blocks_for(leaving.request.num_computed_tokens) - leaving.num_sent

    def begin(self, order: Migrate, request: Request) -> Leaving | None:
        """Offers a running request to the order's target; None where its ingress has gone."""
        handoff = self._member.owner.handoff(request)
        if handoff is None:
            return None
        self._next_number += 1
        leaving = self._leaving[self._next_number] = Leaving(self._next_number, order, request)
        spare = SPARE_BLOCKS * self._lane.capacity.block_size
        limit = min(request.num_prompt_tokens + request.max_tokens, self._lane.capacity.max_model_len)
        num_tokens = max(request.num_computed_tokens, min(request.num_tokens + spare, limit))
        self.guarded(leaving, lambda: self._tell(leaving, Offer(handoff=handoff, num_tokens=num_tokens)))
        reached("offered")
        return leaving

    def on_ready(self, leaving: Leaving) -> None:
        """The target has room."""
        if leaving.phase is Phase.OFFERED:
            leaving.enter(Phase.COPIED)
            self._advance(leaving)

    def boundary(self) -> None:
        """Between two steps: the next copies, and the last ones, where they are due."""
        self._stood_still_bytes = 0
        for leaving in list(self._leaving.values()):
            self.guarded(leaving, partial(self._advance, leaving))

    def guarded(self, leaving: Leaving, work: Callable[[], None]) -> None:
        """Does something for a migration. Where that fails the migration ends."""
        try:
            work()
        except Exception as error:
            if not isinstance(error, PengServeError):
                logger.exception("a migration failed")
            self.give_up(leaving, one_line(error))

    def _advance(self, leaving: Leaving) -> None:
        if leaving.phase is Phase.HELD:
            return
        if not self._is_here(leaving):
            self.give_up(leaving, "the request has ended, or has given up its KV")
        elif leaving.phase is Phase.COPIED:
            self._copy(leaving)

    def _copy(self, leaving: Leaving) -> None:
        request, first = leaving.request, len(leaving.blocks)
        num_full = request.num_computed_tokens // self._lane.capacity.block_size
        is_last = num_full - first <= FEW_BLOCKS or leaving.num_copies >= MAX_COPIES
        stop = self._lane.blocks_for(request.num_computed_tokens) if is_last else num_full
        if is_last and not self._may_stand_still(stop - first):
            return  # others have stood still for as long as a step: it decodes on, and is asked again after the next
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

    def _may_stand_still(self, num_blocks: int) -> bool:
        num_bytes = num_blocks * self._lane.capacity.bytes_per_block
        if self._stood_still_bytes and self._stood_still_bytes + num_bytes > self._pace.num_bytes:
            return False
        self._stood_still_bytes += num_bytes
        return True

    def _submit(self, leaving: Leaving, blocks: list[int], is_last: bool) -> Transfer:
        """The transfer of these blocks; of the last ones, when it has ended."""
        transfers, target, number = self._member.lanes.transfers, leaving.order.target, leaving.number

        def sent() -> None:
            leaving.num_sent = len(leaving.blocks)
            if not is_last:
                leaving.enter(Phase.COPIED)

        plan = TransferPlan(
            lane=self._lane.shape,
            what="KV",
            rank=SOURCE,
            outgoing=[Segment(TARGET, 0, BlockRows(self._member.lanes.dp_view(), blocks))],
            incoming=(),
            on_done=sent,
            on_failed=lambda error: self._failed(leaving, error),
        )
        channel = PeerChannel(lambda _, parts: self._send_piece(target, number, list(parts)))
        leaving.enter(Phase.COPYING)
        transfer = transfers.submit(plan, channel, self._pace)
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
        lanes = self._member.lanes
        lanes.num_migrated += 1
        lanes.migrated_bytes += len(leaving.blocks) * self._lane.capacity.bytes_per_block
        if self._lane.knows(request_id):
            self._lane.release([request_id])
        self._member.owner.moved([request_id], leaving.order.target, carried=True)
        self._end(leaving, has_left=True)

    def stay(self, leaving: Leaving, why: str) -> None:
        """The request is not taken, and goes on here."""
        if not self._is_under_way(leaving):
            return
        logger.debug("request %s stays: %s", leaving.request.request_id, why)
        if leaving.phase is Phase.HELD and self._lane.knows(leaving.request.request_id):
            self._lane.go_on(leaving.request)
        self._end(leaving, has_left=False)

    def give_up(self, leaving: Leaving, why: str) -> None:
        """Ends a migration from this side. A request that the target may have taken is sent again from its tokens."""
        if not self._is_under_way(leaving):
            return
        try:
            self._say(leaving.order.target, leaving.number, Cancel(why=why))
        except LinkLostError:
            logger.debug("instance %s is gone and is not told that a migration ends", leaving.order.target)
        if leaving.phase is not Phase.HELD:
            self.stay(leaving, why)
            return
        request_id = leaving.request.request_id
        self._lane.release([request_id])
        self._member.owner.moved([request_id], None, carried=False)
        self._end(leaving, has_left=True)

    def give_up_all(self, why: str) -> None:
        """Ends all migrations from this side."""
        self._each(self._leaving.values(), lambda leaving: self.give_up(leaving, why))

    def lost(self, target: InstanceKey) -> None:
        """A target is gone. Its tokens count for nothing, as its ingresses wait for MOVED: all requests go on here."""
        there = [leaving for leaving in self._leaving.values() if leaving.order.target == target]
        self._each(there, lambda leaving: self.stay(leaving, f"instance {target} was lost"))

    def check_time(self, timeout_s: float) -> None:
        """Gives up what its target has not answered for so long."""
        now_s, waiting = time.monotonic(), (Phase.OFFERED, Phase.HELD)
        late = [x for x in self._leaving.values() if x.phase in waiting and now_s - x.since_s > timeout_s]
        why = "instance {} gave no answer within {:g} s"
        self._each(late, lambda leaving: self.give_up(leaving, why.format(leaving.order.target, timeout_s)))

    @staticmethod
    def _each(found: Iterable[Leaving], work: Callable[[Leaving], None]) -> None:
        for leaving in list(found):
            work(leaving)

    def _is_under_way(self, leaving: Leaving) -> bool:
        return self._leaving.get(leaving.number) is leaving

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
        self.give_up(leaving, str(EngineError(error)))

    def _end(self, leaving: Leaving, *, has_left: bool) -> None:
        del self._leaving[leaving.number]
        if leaving.transfer is not None:
            self._member.lanes.transfers.cancel(leaving.transfer)
        self._on_end(leaving, has_left)
