"""Requests that leave the group that this instance leads: the source's side of migrations, one request at a time.

offered --Ready--> copying --full tiles sent--> (copying) ... --little is left--> held --Taken--> gone

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
from pengserve.replicas.engine.handoff import can_migrate
from pengserve.replicas.engine.lane import Lane
from pengserve.replicas.engine.vllm_seam import Request, RequestStatus
from pengserve.replicas.migration.messages import Cancel, Copy, Name, Offer, Over, Ready, Send, Side, Tail, Word
from pengserve.replicas.migration.sending import Senders
from pengserve.replicas.migration.sides import followers, side_of
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Member

logger = logging.getLogger(__name__)

MAX_COPIES = 8  # of one request, before the last one: a request that fills tiles faster than they are sent must end
FEW_TILES = 1  # that may be sent while the request stands still, besides the one it is filling
SPARE_TILES = 2  # that the target reserves for what the request fills while it is copied

Say = Callable[[InstanceKey, Name, Word], None]


class Phase(Enum):
    """How far a migration is."""

    OFFERED = auto()
    COPYING = auto()
    COPIED = auto()  # what was to be sent beside the steps has been: the next step boundary goes on
    HELD = auto()


@dataclass(eq=False)
class Leaving:
    """One request on its way."""

    name: Name
    order: Migrate
    request: Request
    lane: Lane  # that it leaves
    source: Side
    num_preemptions: int  # of the request when it was offered: after another one it has other blocks
    target: Side | None = None  # once it has said so
    phase: Phase = Phase.OFFERED
    since_s: float = field(default_factory=time.monotonic)  # when it entered its phase
    num_tiles: int = 0  # that the target has, or has been sent
    num_copies: int = 0
    unsent: set[InstanceKey] = field(default_factory=set)  # members that have not sent their share of the newest copy

    def enter(self, phase: Phase) -> None:
        """Goes on to `phase`."""
        self.phase, self.since_s = phase, time.monotonic()


class Departures:
    """Belongs to the step thread. `on_end(leaving, has_left)` is called once for each that was begun."""

    def __init__(self, member: Member, say: Say, senders: Senders, on_end: Callable[[Leaving, bool], None]) -> None:
        self._member, self._say, self._senders, self._on_end = member, say, senders, on_end
        self._next_number = 0
        self.current: Leaving | None = None

    def begin(self, order: Migrate, request: Request) -> bool:
        """Offers a running request to the order's target; False where its ingress has gone."""
        handoff = self._member.owner.handoff(request)
        if handoff is None:
            return False
        lane, self._next_number = self._member.lanes.current, self._next_number + 1
        name = (self._member.key, self._next_number)
        source, num_preemptions = side_of(self._member), request.num_preemptions
        leaving = self.current = Leaving(name, order, request, lane, source, num_preemptions)
        limit = min(request.num_prompt_tokens + request.max_tokens, lane.capacity.max_model_len)
        spare = SPARE_TILES * self._tile_tokens
        num_tokens = max(request.num_computed_tokens, min(request.num_tokens + spare, limit))
        self._tell_target(leaving, Offer(handoff=handoff, num_tokens=num_tokens, source=leaving.source))
        reached("offered")
        return True

    @property
    def _tile_tokens(self) -> int:
        return self._member.lanes.dp.capacity.block_size

    def on_ready(self, leaving: Leaving, word: Ready) -> None:
        """The target has room, and its prefix cache has the first tiles."""
        if leaving.phase is Phase.OFFERED:
            leaving.target, leaving.num_tiles = word.target, word.num_tiles
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
        """Sends full tiles that the target lacks. Where these are few, the request stands still for all the rest."""
        lane, request, first = leaving.lane, leaving.request, leaving.num_tiles
        num_written = lane.num_written(request)
        stop = num_written // self._tile_tokens
        if is_last := stop - first <= FEW_TILES or leaving.num_copies >= MAX_COPIES:
            if not lane.is_between_steps(request):
                return
            stop = -(-num_written // self._tile_tokens)
        if stop < first:
            raise EngineError("the target has more of the request than there is")
        if stop > first:
            self._send(leaving, stop, is_last=is_last)
        if is_last:
            self._hold(leaving)
        else:
            reached("copying")

    def _send(self, leaving: Leaving, stop: int, *, is_last: bool) -> None:
        assert leaving.target is not None
        first, lane = leaving.num_tiles, leaving.lane
        copy = Copy(number=leaving.num_copies, first=first, count=stop - first)
        leaving.num_tiles, leaving.num_copies = stop, leaving.num_copies + 1
        in_block = lane.capacity.block_size // self._tile_tokens
        blocks = lane.block_ids(leaving.request.request_id)[first // in_block : -(-stop // in_block)]
        word = Send(copy=copy, blocks=blocks, target=leaving.target, is_last=is_last)
        leaving.unsent = set(leaving.source.members)
        leaving.enter(Phase.COPYING)
        self._tell_target(leaving, copy)
        for key in followers(leaving.source, self._member.key):
            self._say(key, leaving.name, word)
        if is_last:
            reached("tail")
        own = self._member.key
        self._senders.send(
            leaving.name,
            word,
            lambda number: self.on_sent(leaving, own, number),
            lambda why: self._failed(leaving, why),
        )

    def on_sent(self, leaving: Leaving, key: InstanceKey, number: int) -> None:
        """Member `key` has sent its share of a copy."""
        if number == leaving.num_copies - 1:
            leaving.unsent.discard(key)
            if not leaving.unsent and leaving.phase is Phase.COPYING:
                leaving.enter(Phase.COPIED)

    def _hold(self, leaving: Leaving) -> None:
        request = leaving.request
        # From here on this scheduler and the target's must not both go on with it.
        leaving.lane.set_aside(request)
        leaving.enter(Phase.HELD)
        tokens = list(request.output_token_ids)
        self._tell_target(leaving, Tail(output_token_ids=tokens, num_computed_tokens=request.num_computed_tokens))
        reached("held")

    # Ends -------------------------------------------------------------------------------------------------------------

    def on_taken(self, leaving: Leaving) -> None:
        """The request goes on at the target."""
        if leaving.phase is not Phase.HELD:
            return
        request_id = leaving.request.request_id
        self._member.lanes.num_migrated += 1
        if leaving.lane.knows(request_id):
            leaving.lane.release([request_id])
        self._member.owner.moved([request_id], leaving.order.target, carried=True)
        self._end(leaving, has_left=True)

    def stay(self, why: str) -> None:
        """The request is not taken, and goes on here."""
        leaving = self.current
        assert leaving is not None
        logger.debug("request %s stays: %s", leaving.request.request_id, why)
        if leaving.phase is Phase.HELD and leaving.lane.knows(leaving.request.request_id):
            leaving.lane.go_on(leaving.request)
        self._end(leaving, has_left=False)

    def give_up(self, why: str) -> None:
        """Ends the migration from this side. A request that the target may have taken is sent again from its tokens."""
        leaving = self.current
        if leaving is None:
            return
        self._call_off(leaving, why)
        if leaving.phase is not Phase.HELD:
            self.stay(why)
            return
        request_id = leaving.request.request_id
        leaving.lane.release([request_id])
        self._member.owner.moved([request_id], None, carried=False)
        self._end(leaving, has_left=True)

    def break_off(self, why: str) -> None:
        """The lane breaks, and all its requests are sent again from their tokens: ends without touching it."""
        if (leaving := self.current) is not None:
            self._call_off(leaving, why)
            self._end(leaving, has_left=False)

    def check_time(self, timeout_s: float) -> None:
        """Gives up what the target has not answered for so long."""
        leaving = self.current
        is_waiting = leaving is not None and leaving.phase in (Phase.OFFERED, Phase.HELD)
        if leaving is not None and is_waiting and time.monotonic() - leaving.since_s > timeout_s:
            self.give_up(f"instance {leaving.order.target} gave no answer within {timeout_s:g} s")

    def _is_here(self, leaving: Leaving) -> bool:
        """Whether the request runs, with the very blocks that have been sent."""
        request, lane = leaving.request, leaving.lane
        return (
            lane is self._member.lanes.current
            and lane.knows(request.request_id)
            and lane.request(request.request_id) is request
            and request.status is RequestStatus.RUNNING
            and request.num_preemptions == leaving.num_preemptions
            and can_migrate(request)
        )

    def _tell_target(self, leaving: Leaving, word: Word) -> None:
        self._say(leaving.order.target, leaving.name, word)

    def _call_off(self, leaving: Leaving, why: str) -> None:
        try:
            self._tell_target(leaving, Cancel(why=why))
        except LinkLostError:
            logger.debug("instance %s is gone and is not told that a migration ends", leaving.order.target)

    def _failed(self, leaving: Leaving, why: str) -> None:
        if self.current is leaving:
            self.give_up(why)

    def _end(self, leaving: Leaving, *, has_left: bool) -> None:
        self.current = None
        self._senders.end(leaving.name)
        for key in followers(leaving.source, self._member.key):
            try:
                self._say(key, leaving.name, Over(lease=[]))
            except LinkLostError:
                logger.debug("instance %s is gone and is not told that a migration ends", key)
        self._on_end(leaving, has_left)
