"""All migrations of one instance: orders of the controller, requests that leave, and requests that come.

Orders wait while the shape changes or a group runs. As many requests leave at once as the link has bytes for a few
steps. Switches win: one that is prepared ends every migration, which leaves the requests where they are.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pengserve.planners.types.errors import FenceError, PengServeError, one_line
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.orders import Migrate
from pengserve.replicas.engine.handoff import can_carry
from pengserve.replicas.engine.lanes import Lanes
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.migration.coming import Arrivals
from pengserve.replicas.migration.leaving import Departures, Leaving
from pengserve.replicas.migration.messages import (
    Cancel,
    Copy,
    MigrationCodec,
    MigrationMessage,
    Offer,
    Ready,
    Tail,
    Taken,
    Word,
)
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.step_thread import StepThread, Submit

logger = logging.getLogger(__name__)

MIGRATE, MIGRATE_KV = "migrate", "migrate-kv"  # kinds of peer messages: words, and pieces of KV
MAX_REMEMBERED_ORDERS = 1024
WATCH_PERIOD_S = 1.0


@dataclass(eq=False)
class _Open:
    """An order under way."""

    order: Migrate
    tried: set[str] = field(default_factory=set)
    num_tokens: int = 0  # of what was offered
    num_leaving: int = 0  # requests that are under way


class Migrations:
    """Belongs to the step thread, but for `order`."""

    def __init__(
        self, member: Member, submit: Submit, is_switching: Callable[[], bool], on_changed: Callable[[], None]
    ) -> None:
        """`on_changed` is called when requests have left, outside a step."""
        self._member, self._submit, self._is_switching, self._on_changed = member, submit, is_switching, on_changed
        self._why_never: str | None = None  # None: it has not been looked at
        self._steps = StepThread(submit, member.timeout_s)
        self._codec = MigrationCodec()
        self._departures = Departures(member, self._say_to_target, self._send_piece, self._ended)
        self._arrivals = Arrivals(member, self._say_to_source, self._why_none_comes)
        self._orders: list[_Open] = []
        self._known: dict[str, None] = {}  # ids of orders, the newest last
        self._is_emptied = False
        self._is_watched = False
        member.network.subscribe(MIGRATE, self._on_word, self._on_lost)
        member.network.subscribe(MIGRATE_KV, self._on_piece)

    @property
    def is_moving(self) -> bool:
        """Whether a request is on its way."""
        return len(self._departures) > 0 or len(self._arrivals) > 0

    @property
    def is_busy(self) -> bool:
        """Whether step boundaries matter: a request is on its way, may soon be, or must not wait here."""
        return self._is_emptied or bool(self._orders) or self.is_moving

    # Orders -----------------------------------------------------------------------------------------------------------

    def order(self, orders: Sequence[Migrate]) -> None:
        """Takes orders; returns at once. From any thread.

        Raises:
            FenceError: one is for another life; none was taken.
        """
        for order in orders:
            if order.source != self._member.key:
                raise FenceError(f"order {order.order_id} is for instance {order.source}, this is {self._member.key}")
        self._submit(lambda: self._guarded(lambda: self._take(orders)))

    def _take(self, orders: Sequence[Migrate]) -> None:
        for order in orders:
            if order.order_id in self._known:
                continue
            self._known[order.order_id] = None
            while len(self._known) > MAX_REMEMBERED_ORDERS:
                del self._known[next(iter(self._known))]
            self._orders.append(_Open(order))
            if order.empties:
                self.begin_leaving()
        self._go_on()
        self._on_changed()  # where nothing runs here, no step tells that a drain is over

    def begin_leaving(self) -> None:
        """The instance is being emptied: nothing comes any more, and what waits without KV is sent again elsewhere."""
        self._is_emptied = True
        self._arrivals.give_up_all("the instance is being emptied")
        self._empty()

    def _empty(self) -> None:
        if self._is_emptied and self._member.lanes.running is None:
            self._redirect([r for r in self._member.lanes.dp.requests() if not r.num_computed_tokens])

    def _redirect(self, requests: Sequence[Request]) -> None:
        ids = [request.request_id for request in requests]
        if ids:
            self._member.lanes.dp.release(ids)
            self._member.owner.moved(ids, None, carried=False)
            self._on_changed()

    def _go_on(self) -> None:
        """Begins the next migrations, as far as there is room on the link, and closes orders that have no more."""
        if self._orders and not self._why_not():
            for found in self._orders.copy():
                while self._departures.has_room() and (request := self._next_request(found)) is not None:
                    self._begin(found, request)
                if not self._departures.has_room():
                    break
                if not found.num_leaving:
                    self._orders.remove(found)
                    self._close(found)
        self._watch()

    def _begin(self, found: _Open, request: Request) -> None:
        found.tried.add(request.request_id)
        found.num_tokens += request.num_computed_tokens
        found.num_leaving += 1
        if self._departures.begin(found.order, request) is None:
            found.num_leaving -= 1

    def _next_request(self, found: _Open) -> Request | None:
        """The shortest running request that the order is about: it is copied soonest."""
        order, lane = found.order, self._member.lanes.dp
        passed = found.tried | self._departures.request_ids()
        able = [r for r in lane.scheduler.running if can_carry(r) and r.request_id not in passed]
        if order.request_ids:
            able = [r for r in able if r.request_id in order.request_ids]
        else:
            able = [r for r in able if found.num_tokens + r.num_computed_tokens <= order.max_tokens]
        return min(able, key=lambda r: (r.num_computed_tokens, r.request_id), default=None)

    def _close(self, found: _Open) -> None:
        """All that could move has moved, or has stayed. What moves by another order is left to that."""
        order, lanes = found.order, self._member.lanes
        if not order.must_leave or lanes.running is not None:
            return
        left = [r for r in lanes.dp.requests() if not order.request_ids or r.request_id in order.request_ids]
        moving = self._departures.request_ids()
        self._redirect([request for request in left if request.request_id not in moving])

    def _ended(self, leaving: Leaving, has_left: bool) -> None:
        for found in self._orders:
            found.num_leaving -= found.order is leaving.order
        self._submit(lambda: self._guarded(self._go_on))
        if has_left:
            self._on_changed()

    # The step thread --------------------------------------------------------------------------------------------------

    def boundary(self) -> None:
        """After each step."""
        self._departures.boundary()
        if self._orders:
            self._guarded(self._go_on)
        if self._is_emptied:
            self._guarded(self._empty)

    def give_way(self) -> None:
        """A switch begins: all requests stay where they are."""
        why = f"instance {self._member.key} changes its shape"
        self._departures.give_up_all(why)
        self._arrivals.give_up_all(why)

    def _guarded(self, work: Callable[[], None]) -> None:
        """A fault in what concerns all migrations ends those that leave, never the instance."""
        try:
            work()
        except Exception as error:
            if not isinstance(error, PengServeError):
                logger.exception("migrations failed")
            self._departures.give_up_all(one_line(error))

    def _why_not(self) -> str:
        """Why no request can move now; empty where it can."""
        if self._why_never is None:
            self._why_never = why_never(self._member.lanes)
        if self._why_never or self._is_switching():
            return self._why_never or f"instance {self._member.key} changes its shape"
        running = self._member.lanes.running
        return f"instance {self._member.key} runs {running.name}" if running is not None else ""

    def _why_none_comes(self) -> str:
        return "the instance is being emptied" if self._is_emptied else self._why_not()

    def _watch(self) -> None:
        """Looks once a period for what makes no progress, while there is anything."""
        if self._is_watched or not (self.is_moving or self._orders):
            return
        self._is_watched = True

        def look() -> None:
            self._is_watched = False
            self._departures.check_time(self._member.timeout_s)
            self._arrivals.check_time(4 * self._member.timeout_s)
            self._go_on()

        self._steps.after(WATCH_PERIOD_S, lambda: self._guarded(look))

    # What peers say ---------------------------------------------------------------------------------------------------

    def _say_to_target(self, to: InstanceKey, number: int, word: Word) -> None:
        self._member.network.send(to, MIGRATE, self._codec.encode(MigrationMessage(number, True, word)))

    def _say_to_source(self, to: InstanceKey, number: int, word: Word) -> None:
        self._member.network.send(to, MIGRATE, self._codec.encode(MigrationMessage(number, False, word)))

    def _send_piece(self, to: InstanceKey, number: int, parts: list) -> None:
        self._member.network.send(to, MIGRATE_KV, [b"%d" % number, *parts])

    def _on_word(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        """In a reader thread."""
        message = MigrationCodec().decode(parts)
        self._submit(lambda: self._hear(key, message))

    def _hear(self, key: InstanceKey, message: MigrationMessage) -> None:
        if message.from_source:
            self._hear_source(key, message)
        elif (leaving := self._departures.find(key, message.number)) is not None:
            self._departures.guarded(leaving, partial(self._hear_target, leaving, message.word))

    def _hear_target(self, leaving: Leaving, word: Word) -> None:
        match word:
            case Ready():
                self._departures.on_ready(leaving)
            case Taken():
                self._departures.on_taken(leaving)
            case Cancel(why=why):
                self._departures.stay(leaving, why)

    def _hear_source(self, key: InstanceKey, message: MigrationMessage) -> None:
        name, arrivals = (key, message.number), self._arrivals
        try:
            match message.word:
                case Offer() as word:
                    arrivals.offer(name, word)
                    self._watch()
                case Copy() as word:
                    arrivals.copy(name, word)
                case Tail() as word:
                    arrivals.tail(name, word)
                case Cancel():
                    arrivals.cancelled(name)
        except Exception as error:
            self._arrival_failed(name, error)

    def _on_piece(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        """In a reader thread."""

        def take() -> None:
            name = (key, int(bytes(parts[0])))
            try:
                self._arrivals.piece(name, parts[1:])
            except Exception as error:
                self._arrival_failed(name, error)

        self._submit(take)

    def _arrival_failed(self, name: tuple[InstanceKey, int], error: Exception) -> None:
        if not isinstance(error, PengServeError):
            logger.exception("a request that came from instance %s could not be taken", name[0])
        self._arrivals.give_up(name, one_line(error))

    def _on_lost(self, key: InstanceKey) -> None:
        """In a reader thread."""

        def lost() -> None:
            self._arrivals.lost(key)
            self._departures.lost(key)

        self._submit(lambda: self._guarded(lost))


def why_never(lanes: Lanes) -> str:
    """Why KV of running requests cannot leave this engine, or come to it; empty where it can."""
    config = lanes.dp.pristine_config
    if config is None or config.speculative_config is not None:
        return "requests do not move with speculative decoding"
    if lanes.dp.num_kv_groups != 1 or lanes.dp.core.batch_queue is not None:
        return "requests of this model move only where all its layers keep KV alike and one step runs at a time"
    try:
        lanes.dp_view()
    except Exception as error:
        return f"KV of this attention backend cannot be moved ({one_line(error)})"
    return ""
