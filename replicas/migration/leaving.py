"""Requests that leave the group that this instance leads: the source's side of migrations.

offered --Ready--> copying --full tiles sent--> (copying) ... --little is left--> held --Taken--> gone

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
from pengserve.replicas.engine.lanes.handoff import can_migrate
from pengserve.replicas.engine.lanes.lane import Lane
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
STEPS_AHEAD = 4  # of bytes that are under way: the link must not wait for the answer to an offer
LEAST_AT_ONCE = 8  # requests that may be under way in any case: the target may have most of their KV already

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
    num_moves: int  # of the request's KV when it was offered: after another one it has other blocks
    target: Side | None = None  # once it has said so
    phase: Phase = Phase.OFFERED
    since_s: float = field(default_factory=time.monotonic)  # when it entered its phase
    num_found: int = 0  # tiles that the target had before
    num_tiles: int = 0  # that it has, or is sent
    num_sent: int = 0  # of these: all but those of a copy that is under way
    num_copies: int = 0
    unsent: set[InstanceKey] = field(default_factory=set)  # members that have not sent their share of the newest copy

    def enter(self, phase: Phase) -> None:
        """Goes on to `phase`."""
        self.phase, self.since_s = phase, time.monotonic()


class Departures:
    """Belongs to the step thread. `on_end(leaving, has_left)` is called once for each that was begun.

    A fault of a migration ends that migration, never the instance.
    """

    def __init__(self, member: Member, say: Say, senders: Senders, on_end: Callable[[Leaving, bool], None]) -> None:
        self._member, self._say, self._senders, self._on_end = member, say, senders, on_end
        self._stood_still_bytes = 0  # sent since the newest step, of requests that stood still meanwhile
        self._next_number = 0
        self._leaving: dict[Name, Leaving] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._leaving)

    def find(self, name: Name) -> Leaving | None:
        """A migration that is under way; None where it has ended here."""
        return self._leaving.get(name)

    def request_ids(self) -> set[str]:
        """Requests that are under way."""
        return {leaving.request.request_id for leaving in self._leaving.values()}

    def first_blocks(self) -> set[int]:
        """Of each request that is under way, the block of its lane that its tokens begin in."""
        here = [x for x in self._leaving.values() if x.lane.knows(x.request.request_id)]
        return {block for leaving in here for block in leaving.lane.block_ids(leaving.request.request_id)[:1]}

    def has_room(self) -> bool:
        """Whether another request may be offered: what is under way is little, or sent within `STEPS_AHEAD` steps."""
        going = [leaving for leaving in self._leaving.values() if leaving.phase is not Phase.HELD]
        unsent_bytes = sum(self._share_bytes(leaving, self._num_unsent(leaving)) for leaving in going)
        return len(going) < LEAST_AT_ONCE or unsent_bytes < STEPS_AHEAD * self._senders.pace.num_bytes

    def _num_unsent(self, leaving: Leaving) -> int:
        """Tiles."""
        return max(0, -(-leaving.request.num_computed_tokens // self._tile_tokens) - leaving.num_sent)

    def _share_bytes(self, leaving: Leaving, num_tiles: int) -> int:
        """What one member of the source sends of so many tiles."""
        return num_tiles * self._member.lanes.dp.capacity.bytes_per_block // len(leaving.source.members)

    def begin(self, order: Migrate, request: Request) -> Leaving | None:
        """Offers a running request to the order's target; None where its ingress has gone."""
        handoff = self._member.owner.handoff(request)
        if handoff is None:
            return None
        lane, self._next_number = self._member.lanes.current, self._next_number + 1
        name = (self._member.key, self._next_number)
        source, num_moves = side_of(self._member), lane.num_moves(request)
        leaving = self._leaving[name] = Leaving(name, order, request, lane, source, num_moves)
        limit = min(request.num_prompt_tokens + request.max_tokens, lane.capacity.max_model_len)
        spare = SPARE_TILES * self._tile_tokens
        num_tokens = max(request.num_computed_tokens, min(request.num_tokens + spare, limit))
        offer = Offer(handoff=handoff, num_tokens=num_tokens, source=leaving.source)
        self.guarded(leaving, lambda: self._tell_target(leaving, offer))
        reached("offered")
        return leaving

    @property
    def _tile_tokens(self) -> int:
        return self._member.lanes.dp.capacity.block_size

    def on_ready(self, leaving: Leaving, word: Ready) -> None:
        """The target has room, and its prefix cache has the first tiles."""
        if leaving.phase is Phase.OFFERED:
            leaving.target = word.target
            leaving.num_found = leaving.num_tiles = leaving.num_sent = word.num_tiles
            leaving.enter(Phase.COPIED)
            self._advance(leaving)

    def boundary(self) -> None:
        """Between two steps: the next copies, and the last ones, where they are due."""
        self._stood_still_bytes = 0
        self._each(self._leaving.values(), lambda leaving: self.guarded(leaving, partial(self._advance, leaving)))

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
        """Sends full tiles that the target lacks. Where these are few, the request stands still for all the rest."""
        lane, request, first = leaving.lane, leaving.request, leaving.num_tiles
        num_written = lane.num_written(request)
        stop = num_written // self._tile_tokens
        if is_last := stop - first <= FEW_TILES or leaving.num_copies >= MAX_COPIES:
            if not lane.is_between_steps(request):
                return
            stop = -(-num_written // self._tile_tokens)
            if not self._may_stand_still(self._share_bytes(leaving, max(0, stop - first))):
                return  # others have stood still for as long as a step: it decodes on until after the next
        if stop < first:
            raise EngineError("the target has more of the request than there is")
        if stop > first:
            self._send(leaving, stop, is_last=is_last)
        if is_last:
            self._hold(leaving)
        else:
            reached("copying")

    def _may_stand_still(self, num_bytes: int) -> bool:
        if self._stood_still_bytes and self._stood_still_bytes + num_bytes > self._senders.pace.num_bytes:
            return False
        self._stood_still_bytes += num_bytes
        return True

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
            lambda why: self.give_up(leaving, why),
        )

    def on_sent(self, leaving: Leaving, key: InstanceKey, number: int) -> None:
        """Member `key` has sent its share of a copy."""
        if number == leaving.num_copies - 1:
            leaving.unsent.discard(key)
            if not leaving.unsent and leaving.phase is Phase.COPYING:
                leaving.num_sent = leaving.num_tiles
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
        lanes = self._member.lanes
        lanes.num_migrated += 1
        lanes.migrated_bytes += (leaving.num_tiles - leaving.num_found) * lanes.dp.capacity.bytes_per_block
        if leaving.lane.knows(request_id):
            leaving.lane.release([request_id])
        self._member.owner.moved([request_id], leaving.order.target, carried=True)
        self._end(leaving, has_left=True)

    def stay(self, leaving: Leaving, why: str) -> None:
        """The request is not taken, and goes on here."""
        if self.find(leaving.name) is not leaving:
            return
        logger.debug("request %s stays: %s", leaving.request.request_id, why)
        if leaving.phase is Phase.HELD and leaving.lane.knows(leaving.request.request_id):
            leaving.lane.go_on(leaving.request)
        self._end(leaving, has_left=False)

    def give_up(self, leaving: Leaving, why: str) -> None:
        """Ends a migration from this side. A request that the target may have taken is sent again from its tokens."""
        if self.find(leaving.name) is not leaving:
            return
        self._call_off(leaving, why)
        if leaving.phase is not Phase.HELD:
            self.stay(leaving, why)
            return
        request_id = leaving.request.request_id
        leaving.lane.release([request_id])
        self._member.owner.moved([request_id], None, carried=False)
        self._end(leaving, has_left=True)

    def give_up_all(self, why: str) -> None:
        """Ends all migrations from this side."""
        self._each(self._leaving.values(), lambda leaving: self.give_up(leaving, why))

    def break_off(self, why: str) -> None:
        """The lane breaks, and all its requests are sent again from their tokens: ends without touching it."""

        def end(leaving: Leaving) -> None:
            self._call_off(leaving, why)
            self._end(leaving, has_left=False)

        self._each(self._leaving.values(), end)

    def lost(self, target: InstanceKey) -> None:
        """A target is gone. Its tokens count for nothing, as its ingresses wait for MOVED: all requests go on here.

        Where another member of its group is gone, the target says what has become of the requests.
        """
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

    def _is_here(self, leaving: Leaving) -> bool:
        """Whether the request runs or is parked, with the very blocks that have been sent."""
        request, lane = leaving.request, leaving.lane
        return (
            lane is self._member.lanes.current
            and lane.knows(request.request_id)
            and lane.request(request.request_id) is request
            and request.status in (RequestStatus.RUNNING, RequestStatus.PREEMPTED)
            and lane.num_moves(request) == leaving.num_moves
            and can_migrate(request)
        )

    def _tell_target(self, leaving: Leaving, word: Word) -> None:
        self._say(leaving.order.target, leaving.name, word)

    def _call_off(self, leaving: Leaving, why: str) -> None:
        try:
            self._tell_target(leaving, Cancel(why=why))
        except LinkLostError:
            logger.debug("instance %s is gone and is not told that a migration ends", leaving.order.target)

    def _end(self, leaving: Leaving, *, has_left: bool) -> None:
        del self._leaving[leaving.name]
        self._senders.end(leaving.name)
        for key in followers(leaving.source, self._member.key):
            try:
                self._say(key, leaving.name, Over(lease=[]))
            except LinkLostError:
                logger.debug("instance %s is gone and is not told that a migration ends", key)
        self._on_end(leaving, has_left)
