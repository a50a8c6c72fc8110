"""Requests that come to the group that this instance leads: the target's side of migrations.

Offer --(grammar compiled)--> room is reserved, Ready --Copy, pieces, ...--> Tail, all is written --> in the lane

Until it is taken a request is known to the scheduler but not scheduled, and its blocks are its own.
"""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from pengserve.planners.types.errors import EngineError, LinkLostError
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.engine.lanes.handoff import Handoff
from pengserve.replicas.engine.lanes.lane import Lane
from pengserve.replicas.engine.vllm_seam import Request, RequestStatus
from pengserve.replicas.migration.messages import (
    Cancel,
    Copy,
    Expect,
    Name,
    Offer,
    Over,
    Ready,
    Side,
    Tail,
    Taken,
    Word,
)
from pengserve.replicas.migration.receiving import Receivers
from pengserve.replicas.migration.sides import followers, side_of
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.step_thread import Submit

logger = logging.getLogger(__name__)

Say = Callable[[InstanceKey, Name, Word], None]


@dataclass(eq=False)
class Coming:
    """One request on its way."""

    name: Name
    handoff: Handoff
    lane: Lane  # that it goes on in
    source: Side
    target: Side
    request: Request | None = None  # once room for it is reserved
    num_tiles: int = 0  # that are here, or have been named by a Copy
    num_copies: int = 0
    written: dict[InstanceKey, int] = field(default_factory=dict)  # copies by member
    tail: Tail | None = None
    heard_s: float = field(default_factory=time.monotonic)  # when its source, or a member, last said something

    @property
    def is_written(self) -> bool:
        """Whether all members have all that has been named."""
        return all(self.written.get(key, 0) == self.num_copies for key in self.target.members)


class Arrivals:
    """Belongs to the step thread. `why_not` says why nothing can come now, or is empty."""

    def __init__(
        self, member: Member, submit: Submit, say: Say, receivers: Receivers, why_not: Callable[[], str]
    ) -> None:
        self._member, self._submit, self._say, self._receivers = member, submit, say, receivers
        self._why_not = why_not
        self._coming: dict[Name, Coming] = {}

    def __len__(self) -> int:
        return len(self._coming)

    def request_ids(self) -> set[str]:
        """Requests that are on their way. The lane's scheduler knows those that have blocks already."""
        return {coming.handoff.request.request_id for coming in self._coming.values()}

    # Before the first copy --------------------------------------------------------------------------------------------

    def offer(self, name: Name, word: Offer) -> None:
        """Reserves room, or says why not. A grammar is compiled first, in another thread."""
        if why := self._why_not() or self._refusal(word.handoff):
            self._say(name[0], name, Cancel(why=why))
            return
        lanes = self._member.lanes
        self._coming[name] = coming = Coming(name, word.handoff, lanes.current, word.source, side_of(self._member))

        def made(request: Request) -> None:
            if self._coming.get(name) is coming:
                self._reserve(coming, request, word.num_tokens)

        is_guided = word.handoff.request.sampling_params.structured_outputs is not None
        later = (lambda request: self._submit(lambda: made(request))) if is_guided else made
        lanes.dp.revive(word.handoff, later)

    def _refusal(self, handoff: Handoff) -> str:
        if self._member.lanes.current.knows(handoff.request.request_id):
            return "the request is here already"
        if not self._member.owner.serves(handoff.client_id):
            return "its ingress is not connected here"
        return ""

    def _reserve(self, coming: Coming, request: Request, num_tokens: int) -> None:
        lane, name = coming.lane, coming.name
        if request.status is not RequestStatus.PREEMPTED:
            self.give_up(name, "its grammar cannot be compiled here")
            return
        num_cached = lane.reserve(request, num_tokens, coming.handoff.num_computed_tokens)
        if num_cached is None:
            self.give_up(name, "there is no room")
            return
        coming.request, coming.num_tiles = request, num_cached // self._tile_tokens
        self._receivers.open(name)
        reached("reserved")
        self._say(name[0], name, Ready(num_tiles=coming.num_tiles, target=coming.target))

    @property
    def _tile_tokens(self) -> int:
        return self._member.lanes.dp.capacity.block_size

    # Copies -----------------------------------------------------------------------------------------------------------

    def copy(self, name: Name, word: Copy) -> None:
        """Tiles are about to come."""
        coming = self._find(name)
        request, lane, stop = coming.request, coming.lane, word.first + word.count
        if (word.first, word.number) != (coming.num_tiles, coming.num_copies) or word.count < 1 or request is None:
            raise EngineError("it announced tiles out of their order")
        if not lane.enlarge(request, stop * self._tile_tokens):
            self.give_up(name, "there is no room")
            return
        coming.num_tiles, coming.num_copies = stop, coming.num_copies + 1
        in_block = lane.capacity.block_size // self._tile_tokens
        blocks = lane.block_ids(request.request_id)[word.first // in_block : -(-stop // in_block)]
        expect = Expect(copy=word, blocks=blocks, source=coming.source, lease=lane.take_lease())
        for key in followers(coming.target, self._member.key):
            self._say(key, name, expect)
        self._receivers.expect(name, expect)

    def heard(self, name: Name) -> None:
        """Something of a migration has come."""
        if (coming := self._coming.get(name)) is not None:
            coming.heard_s = time.monotonic()

    def written(self, name: Name, key: InstanceKey, number: int) -> None:
        """Member `key` has its share of a copy."""
        if (coming := self._coming.get(name)) is not None:
            coming.heard_s = time.monotonic()
            coming.written[key] = number + 1
            self._take_if_complete(coming)

    def tail(self, name: Name, word: Tail) -> None:
        """All has left the source: the request goes on here, as soon as all is written."""
        reached("tail-came")
        coming = self._find(name)
        coming.tail = word
        self._take_if_complete(coming)

    def _take_if_complete(self, coming: Coming) -> None:
        word, request = coming.tail, coming.request
        if word is None or not coming.is_written:
            return
        lane, name, dp, computed = coming.lane, coming.name, self._member.lanes.dp, word.num_computed_tokens
        if request is None or coming.num_tiles != -(-computed // self._tile_tokens):
            raise EngineError("it did not send all KV")
        dp.append(request, word.output_token_ids[request.num_output_tokens :])
        if not lane.enlarge(request, min(request.num_tokens, computed + 1)):
            self.give_up(name, "there is no room")
            return
        if (client_index := self._member.owner.welcome(coming.handoff)) is None:
            self.give_up(name, "its ingress is not connected here")
            return
        request.client_index = client_index
        lane.take_over(request)
        request.num_computed_tokens = computed
        lane.settle(request)
        lane.go_on(request)
        del self._coming[name]
        self._end(coming)
        self._say(name[0], name, Taken())
        reached("taken")

    # Ends -------------------------------------------------------------------------------------------------------------

    def cancelled(self, name: Name) -> None:
        """The source has called it off. Where the request has been taken, its ingress ends one of the two."""
        if (coming := self._coming.pop(name, None)) is not None:
            self._end(coming)  # no member writes into its blocks from here on
            if coming.request is not None:
                coming.lane.release([coming.request.request_id])

    def give_up(self, name: Name, why: str) -> None:
        """Ends a migration from this side: the request stays at its source."""
        self.cancelled(name)
        self._tell(name[0], name, Cancel(why=why))

    def give_up_all(self, why: str) -> None:
        """Ends all migrations from this side."""
        for name in list(self._coming):
            self.give_up(name, why)

    def let_go(self, request_ids: Collection[str]) -> None:
        """These requests are about to be aborted here: what still comes of them must find no blocks to be written to.

        An ingress that has heard of a migration to here, and not yet of the next ones, aborts a request that has left
        in between and comes again.
        """
        coming = [name for name, found in self._coming.items() if found.handoff.request.request_id in request_ids]
        for name in coming:
            self.give_up(name, "it was aborted here")

    def break_off(self, why: str) -> None:
        """The lane breaks, with all that it has: ends all migrations without touching it."""
        for name in list(self._coming):
            del self._coming[name]
            self._receivers.end(name)
            self._tell(name[0], name, Cancel(why=why))

    def lost(self, key: InstanceKey) -> None:
        """A peer is gone."""
        for name, coming in list(self._coming.items()):
            if key in coming.source.members:
                self.give_up(name, f"instance {key} was lost")

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

    def _end(self, coming: Coming) -> None:
        self._receivers.end(coming.name)
        for key in followers(coming.target, self._member.key):
            self._tell(key, coming.name, Over(lease=coming.lane.take_lease()))

    def _tell(self, key: InstanceKey, name: Name, word: Word) -> None:
        try:
            self._say(key, name, word)
        except LinkLostError:
            logger.debug("instance %s is gone and is not told that a migration ends", key)
