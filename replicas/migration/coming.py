"""Requests that come to this instance from others: the target's side of migrations.

Offer --room is reserved--> Copy, pieces, ... --> Tail: the request joins the lane

Until its Tail a request is known to the scheduler but not scheduled, and its blocks are its own.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pengserve.planners.types.errors import EngineError, LinkLostError
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.handoff import Handoff, revive
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.kv.channel import PeerChannel
from pengserve.replicas.kv.rows import BlockRows
from pengserve.replicas.kv.transfer import Segment, Transfer, TransferPlan
from pengserve.replicas.migration.leaving import SOURCE, TARGET, Say
from pengserve.replicas.migration.messages import Cancel, Copy, Offer, Ready, Tail, Taken
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Member

logger = logging.getLogger(__name__)

Name = tuple[InstanceKey, int]
"""The source, and its number for the migration."""


@dataclass(eq=False)
class Coming:
    """One request on its way."""

    name: Name
    handoff: Handoff
    request: Request
    transfer: Transfer | None = None  # of the newest Copy
    num_blocks: int = 0  # that have been named by a Copy
    heard_s: float = field(default_factory=time.monotonic)  # when its source last said something


class Arrivals:
    """Belongs to the step thread. `why_not` says why nothing can come now, or is empty."""

    def __init__(self, member: Member, say: Say, why_not: Callable[[], str]) -> None:
        self._member, self._say, self._why_not = member, say, why_not
        self._lane = member.lanes.dp
        self._coming: dict[Name, Coming] = {}

    def __len__(self) -> int:
        return len(self._coming)

    def offer(self, name: Name, word: Offer) -> None:
        """Reserves room, or says why not."""
        why = self._why_not() or self._refusal(word)
        request = revive(word.handoff, 0)
        if not why and not self._lane.reserve(request, word.num_tokens):
            why = "there is no room"
        if why:
            self._say(*name, Cancel(why=why))
            return
        self._coming[name] = Coming(name, word.handoff, request)
        reached("reserved")
        self._say(*name, Ready())

    def _refusal(self, word: Offer) -> str:
        handoff = word.handoff
        if self._lane.knows(handoff.request.request_id):
            return "the request is here already"
        if not self._member.owner.serves(handoff.client_id):
            return "its ingress is not connected here"
        return ""

    def copy(self, name: Name, word: Copy) -> None:
        """Blocks are about to come."""
        coming = self._find(name)
        stop = word.first + word.count
        if not self._is_written(coming) or word.first != coming.num_blocks or word.count < 1:
            raise EngineError("it announced blocks out of their order")
        if not self._lane.enlarge(coming.request, stop * self._lane.capacity.block_size):
            self.give_up(name, "there is no room")
            return
        coming.num_blocks = stop
        blocks = self._lane.block_ids(coming.request.request_id)[word.first : stop]
        plan = TransferPlan(
            lane=self._lane.shape,
            what="KV",
            rank=TARGET,
            outgoing=(),
            incoming=[Segment(SOURCE, 0, BlockRows(self._member.lanes.dp_view(), blocks))],
        )
        coming.transfer = self._member.lanes.transfers.submit(plan, PeerChannel(lambda *_: None))
        coming.transfer.advance(0.0)  # it sends nothing

    def piece(self, name: Name, parts: Sequence[Buffer]) -> None:
        """Bytes of blocks have come."""
        if (coming := self._coming.get(name)) is None:
            return  # of a migration that has ended here
        coming.heard_s = time.monotonic()
        if coming.transfer is None:
            raise EngineError("it sent KV that it did not announce")
        coming.transfer.receive(SOURCE, parts)

    def tail(self, name: Name, word: Tail) -> None:
        """All has come: the request goes on here, in the next step."""
        reached("tail-came")
        coming, computed = self._find(name), word.num_computed_tokens
        request, known = coming.request, coming.request.num_output_tokens
        if not self._is_written(coming) or coming.num_blocks != self._lane.blocks_for(computed):
            raise EngineError("it did not send all KV")
        request.append_output_token_ids(word.output_token_ids[known:])
        if not self._lane.enlarge(request, min(request.num_tokens, computed + 1)):
            self.give_up(name, "there is no room")
            return
        if (client_index := self._member.owner.welcome(coming.handoff)) is None:
            self.give_up(name, "its ingress is not connected here")
            return
        request.client_index = client_index
        self._lane.adopt(request)
        request.num_computed_tokens = computed
        self._lane.settle(request)
        self._lane.go_on(request)
        del self._coming[name]
        self._end(coming)
        self._say(*name, Taken())
        reached("taken")

    def cancelled(self, name: Name) -> None:
        """The source has called it off. Where the request has been taken, its ingress ends one of the two."""
        if (coming := self._coming.pop(name, None)) is not None:
            self._end(coming)
            self._lane.release([coming.request.request_id])

    def give_up(self, name: Name, why: str) -> None:
        """Ends a migration from this side: the request stays at its source."""
        self.cancelled(name)
        try:
            self._say(*name, Cancel(why=why))
        except LinkLostError:
            logger.debug("instance %s is gone and is not told that a migration ends", name[0])

    def give_up_all(self, why: str) -> None:
        """Ends all migrations from this side."""
        for name in list(self._coming):
            self.give_up(name, why)

    def lost(self, key: InstanceKey) -> None:
        """A peer is gone."""
        for name in [name for name in self._coming if name[0] == key]:
            self.cancelled(name)

    def check_time(self, timeout_s: float) -> None:
        """Gives up what has made no progress for so long."""
        now_s = time.monotonic()
        for name in [name for name, coming in self._coming.items() if now_s - coming.heard_s > timeout_s]:
            self.give_up(name, f"its source said nothing for {timeout_s:g} s")

    def _find(self, name: Name) -> Coming:
        if (coming := self._coming.get(name)) is None:
            raise EngineError("the migration has ended here")
        coming.heard_s = time.monotonic()
        return coming

    @staticmethod
    def _is_written(coming: Coming) -> bool:
        return coming.transfer is None or coming.transfer.is_done

    def _end(self, coming: Coming) -> None:
        if coming.transfer is not None:
            self._member.lanes.transfers.cancel(coming.transfer)
