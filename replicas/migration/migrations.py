"""All migrations of one instance: orders of the controller, requests that leave, and requests that come.

The leader of a group decides for its group; its other members send and get their shares of the KV. Orders wait while
the shape changes. As many requests leave a group at once as its connections have bytes for in a few steps. Switches
win: one that is prepared ends every migration of its members, which leaves the requests where they are.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from pengserve.planners.redirect import choose_redirected
from pengserve.planners.types.errors import FenceError, PengServeError, one_line
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.orders import Migrate, Redirect
from pengserve.replicas.engine.lanes.handoff import can_migrate
from pengserve.replicas.engine.lanes.lane import Lane
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.migration.coming import Arrivals
from pengserve.replicas.migration.leaving import Departures, Leaving
from pengserve.replicas.migration.members import Members, why_never
from pengserve.replicas.migration.messages import (
    Cancel,
    Copy,
    Failed,
    Name,
    Offer,
    Ready,
    Sent,
    Tail,
    Taken,
    Word,
    Written,
)
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.step_thread import StepThread, Submit
from pengserve.replicas.taken_orders import TakenOrders

logger = logging.getLogger(__name__)

WATCH_PERIOD_S = 1.0


@dataclass(eq=False)
class _Open:
    """An order under way."""

    order: Migrate
    tried: set[str] = field(default_factory=set)
    num_tokens: int = 0  # of what was offered
    num_leaving: int = 0  # requests that are under way

    def gives_way_to(self, newer: Migrate) -> bool:
        """Whether it need not be carried out any more, since `newer` has come."""
        is_named = self.order.request_ids or newer.request_ids
        return not self.tried and not is_named and self.order.target == newer.target


class Migrations:
    """Belongs to the step thread, but for `order`."""

    def __init__(
        self, member: Member, submit: Submit, is_switching: Callable[[], bool], on_changed: Callable[[], None]
    ) -> None:
        """`on_changed` is called when requests have left, outside a step."""
        self._member, self._submit, self._is_switching, self._on_changed = member, submit, is_switching, on_changed
        self._why_never: str | None = None  # None: it has not been looked at
        self._steps = StepThread(submit, member.timeout_s)
        self._members = members = Members(member, submit, self._hear, self._lost)
        self._departures = Departures(member, members.say, members.senders, self._ended)
        self._arrivals = Arrivals(member, submit, members.say, members.receivers, self._why_none_comes)
        members.on_piece = self._arrivals.heard
        self._orders: list[_Open] = []
        self._known = TakenOrders()
        self._is_emptied = False
        self._is_watched = False

    @property
    def is_moving(self) -> bool:
        """Whether a request is on its way."""
        return len(self._departures) > 0 or len(self._arrivals) > 0

    @property
    def is_busy(self) -> bool:
        """Whether step boundaries matter: a request is on its way, may soon be, or must not wait here."""
        return self._is_emptied or bool(self._orders) or self.is_moving

    @property
    def _lane(self) -> Lane | None:
        """The lane whose requests may leave; None where another instance schedules."""
        lanes = self._member.lanes
        return lanes.current if lanes.running is None or lanes.current is lanes.running else None

    # Orders -----------------------------------------------------------------------------------------------------------

    def order(self, orders: Sequence[Migrate | Redirect]) -> None:
        """Takes orders; returns at once. From any thread.

        Raises:
            FenceError: one is for another life; none was taken.
        """
        for order in orders:
            if order.source != self._member.key:
                raise FenceError(f"order {order.order_id} is for instance {order.source}, this is {self._member.key}")
        self._submit(lambda: self._guarded(lambda: self._take(orders)))

    def _take(self, orders: Sequence[Migrate | Redirect]) -> None:
        for order in orders:
            if not self._known.take(order.order_id):
                continue
            if isinstance(order, Redirect):
                self._send_on(order)
                continue
            # The newest knows best where there is room: it stands for those to its target that have not begun.
            self._orders = [found for found in self._orders if not found.gives_way_to(order)]
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
        if self._is_emptied and (lane := self._lane) is not None:
            self._redirect(lane, _without_kv(lane))

    def _send_on(self, order: Redirect) -> None:
        """What waits without KV goes where it can begin. Nothing is done while the shape changes: it is asked again."""
        lane = self._lane
        if lane is None or self._is_emptied or self._why_not():
            return
        sizes = ((r, r.num_tokens, lane.scheduler.cached_tokens(r)) for r in _without_kv(lane))
        self._redirect(lane, choose_redirected(sizes, order.max_tokens), order.target)

    def _redirect(self, lane: Lane, requests: Sequence[Request], target: InstanceKey | None = None) -> None:
        ids = [request.request_id for request in requests]
        if ids:
            lane.release(ids)
            self._member.owner.moved(ids, target, carried=False)
            self._on_changed()

    def _go_on(self) -> None:
        """Begins the next migrations, as far as there is room on the link, and closes orders that have no more."""
        if self._lane is None:
            self._orders.clear()  # they are about what this instance ran alone, or led: its leader gets its own
        if self._orders and not self._why_not():
            for found in self._orders.copy():
                while self._departures.has_room() and (request := self._next_request(found)) is not None:
                    self._begin(found, request)
                if not self._departures.has_room():
                    break
                if not found.num_leaving and not self._able(found):
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
        """The shortest running request that the order is about: it is copied soonest.

        One that shares a prefix with a request under way comes after that: the target has the prefix then.
        """
        lane, busy = self._member.lanes.current, self._departures.first_blocks()
        able = [r for r in self._able(found) if busy.isdisjoint(lane.block_ids(r.request_id)[:1])]
        return min(able, key=lambda r: (r.num_computed_tokens, r.request_id), default=None)

    def _able(self, found: _Open) -> list[Request]:
        """Running and parked requests that the order is about, and that it has not tried."""
        order, lane = found.order, self._member.lanes.current
        passed = found.tried | self._departures.request_ids()
        able = [r for r in lane.served(must_leave=order.must_leave) if can_migrate(r) and r.request_id not in passed]
        if order.request_ids:
            return [r for r in able if r.request_id in order.request_ids]
        return [r for r in able if found.num_tokens + r.num_computed_tokens <= order.max_tokens]

    def _close(self, found: _Open) -> None:
        """All that could move has moved, or has stayed. What moves by another order, or comes, is left to that."""
        order, lane = found.order, self._lane
        if order.must_leave and lane is not None:
            ids, moving = order.request_ids, self._departures.request_ids() | self._arrivals.request_ids()
            left = [r for r in lane.requests() if not ids or r.request_id in ids]
            self._redirect(lane, [request for request in left if request.request_id not in moving])

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

    def let_go(self, request_ids: Collection[str]) -> None:
        """Before requests are aborted here: those that come stay at their sources."""
        self._arrivals.let_go(request_ids)

    def give_way(self) -> None:
        """A switch begins: all requests stay where they are."""
        self.give_up_all(f"instance {self._member.key} changes its shape")

    def give_up_all(self, why: str) -> None:
        """All requests stay where they are. The lane goes on, and has nothing of any migration any more."""
        self._departures.give_up_all(why)
        self._arrivals.give_up_all(why)
        self._members.fail_all(why)

    def break_off(self) -> None:
        """The group that runs here breaks: its lane ends, with all that is on its way from it and to it."""
        why = f"the group of instance {self._member.key} has ended"
        self._departures.break_off(why)
        self._arrivals.break_off(why)
        self._members.end_all()

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
        if running is None:
            return ""
        if self._lane is None:
            return f"instance {self._member.key} follows in {running.name}; ask its leader"
        waits = running.is_exchanging or not running.is_settled
        return f"{running.name} still waits for KV, memory or weights" if waits else ""

    def _why_none_comes(self) -> str:
        return "the instance is being emptied" if self._is_emptied else self._why_not()

    def _watch(self) -> None:
        """Looks once a period for what makes no progress, while there is anything."""
        if self._is_watched or not (self.is_moving or self._orders):
            return
        self._is_watched = True

        def look() -> None:
            self._is_watched = False
            self._departures.boundary()  # where no step is made, no step shows that the request has ended
            self._departures.check_time(self._member.timeout_s)
            self._arrivals.check_time(4 * self._member.timeout_s)
            self._go_on()

        self._steps.after(WATCH_PERIOD_S, lambda: self._guarded(look))

    # What peers say ---------------------------------------------------------------------------------------------------

    def _hear(self, key: InstanceKey, name: Name, word: Word) -> None:
        """A word to a leader, from the other one or from a member of the own group."""
        if name[0] == self._member.key:
            if (leaving := self._departures.find(name)) is not None:
                self._departures.guarded(leaving, partial(self._hear_of_departure, key, leaving, word))
            return
        try:
            self._hear_of_arrival(key, name, word)
        except Exception as error:
            if not isinstance(error, PengServeError):
                logger.exception("a request that comes from instance %s could not be taken", name[0])
            self._arrivals.give_up(name, one_line(error))

    def _hear_of_departure(self, key: InstanceKey, leaving: Leaving, word: Word) -> None:
        is_target = key == leaving.order.target
        match word:
            case Ready() if is_target:
                self._departures.on_ready(leaving, word)
            case Taken() if is_target:
                self._departures.on_taken(leaving)
            case Cancel() if is_target:
                self._departures.stay(leaving, word.why)
            case Sent():
                self._departures.on_sent(leaving, key, word.number)
            case Failed():
                self._departures.give_up(leaving, f"instance {key}: {word.why}")

    def _hear_of_arrival(self, key: InstanceKey, name: Name, word: Word) -> None:
        match word:
            case Offer():
                self._arrivals.offer(name, word)
                self._watch()
            case Copy():
                self._arrivals.copy(name, word)
            case Written():
                self._arrivals.written(name, key, word.number)
            case Tail():
                self._arrivals.tail(name, word)
            case Cancel():
                self._arrivals.cancelled(name)
            case Failed():
                self._arrivals.give_up(name, f"instance {key}: {word.why}")

    def _lost(self, key: InstanceKey) -> None:
        """A peer is gone."""
        self._guarded(lambda: self._arrivals.lost(key))
        self._guarded(lambda: self._departures.lost(key))


def _without_kv(lane: Lane) -> list[Request]:
    """Requests that wait there and hold no KV, the next one first."""
    return [request for request in lane.requests() if not request.num_computed_tokens]
