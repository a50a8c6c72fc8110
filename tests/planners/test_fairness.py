"""Laws of fair shares: a flood queues behind itself, no request starves, counters are conserved, memory is bounded."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pengserve.planners.fairness import LIFTED, FairConfig, FairShares, Order, told_band
from pengserve.planners.types.contract import BUILT_IN_CLASSES, ServiceClass, by_name

CLASSES = by_name([ServiceClass(name="flex", priority=1, weight=0.5, guaranteed_share=0.2)])
CONFIG = FairConfig(classes=CLASSES, age_s=10.0)


class Server:
    """Begins the request of the least order, one at a time, and carries what planners say to its queue."""

    def __init__(self, config: FairConfig = CONFIG) -> None:
        self.shares = FairShares(config)
        self.orders: dict[str, Order] = {}
        self.now_s = 0.0
        self.begun: list[str] = []

    def add(
        self, name: str, tenant: str, cost_s: float = 1.0, priority: int = 0, service_class: str = "default"
    ) -> None:
        self.orders |= self.shares.add(name, tenant, service_class, priority, cost_s, self.now_s)

    def serve(self, cost_s: float | None = None, wait_s: float = 0.0) -> str:
        """Begins one and ends it; `cost_s`: what it really costs, where that is not its estimate."""
        self.now_s += wait_s
        self.orders |= {i: order for i, order in self.shares.tend(self.now_s).items() if i in self.orders}
        name = min(self.orders, key=lambda each: (self.orders[each], each))
        del self.orders[name]
        self.shares.begin(name, self.now_s)
        if cost_s is not None:
            self.shares.charge(name, cost_s, self.now_s)
        self.shares.end(name, self.now_s)
        self.begun.append(name)
        return name


def test_a_newcomer_begins_before_what_a_flood_has_queued() -> None:
    server = Server()
    for index in range(100):
        server.add(f"flood {index:03}", "flood")
    for _ in range(10):
        server.serve(1.0)
    server.add("guest", "guest")
    assert server.serve(1.0) == "guest"


def test_tenants_that_wait_are_served_by_their_weights() -> None:
    server = Server(replace(CONFIG, weights={"large": 3.0}, age_s=1e9))
    for index in range(400):
        server.add(f"large {index:03}", "large")
        server.add(f"small {index:03}", "small")
    begun = [server.serve(1.0) for _ in range(200)]
    assert 148 <= sum(name.startswith("large") for name in begun) <= 152


@pytest.mark.parametrize("factor", [0.1, 5.0])
def test_real_costs_count_and_not_estimates(factor: float) -> None:
    """A tenant whose requests cost other than what is estimated gets the same seconds all the same."""
    server = Server(replace(CONFIG, age_s=1e9))
    for index in range(3000):
        server.add(f"odd {index:04}", "odd")
        server.add(f"plain {index:04}", "plain")
    served = {"odd": 0.0, "plain": 0.0}
    for _ in range(600):
        name = min(server.orders, key=lambda each: (server.orders[each], each)).split()[0]
        cost_s = factor if name == "odd" else 1.0
        served[server.serve(cost_s).split()[0]] += cost_s
    assert served["odd"] == pytest.approx(served["plain"], rel=0.05)


def test_time_in_which_a_tenant_asks_for_nothing_earns_no_credit() -> None:
    server = Server()
    for index in range(200):
        server.add(f"busy {index:03}", "busy")
    for _ in range(100):
        server.serve(1.0)
    for index in range(100):
        server.add(f"late {index:03}", "late")
    begun = [server.serve(1.0) for _ in range(40)]
    assert 18 <= sum(name.startswith("late") for name in begun) <= 22


def test_a_more_urgent_request_goes_first_and_may_become_so_while_it_waits() -> None:
    server = Server()
    for index in range(5):
        server.add(f"r{index}", "one")
    server.add("urgent", "one", priority=-1)
    assert server.serve() == "urgent"
    server.orders |= server.shares.prioritize("r3", -2)
    assert server.serve() == "r3" and server.serve() == "r0"


def test_a_class_gets_its_guaranteed_share_below_a_flood_of_more_urgent_ones() -> None:
    server = Server(replace(CONFIG, age_s=1e9))
    for index in range(400):
        server.add(f"urgent {index:03}", "a", priority=-1, service_class="priority")
        server.add(f"flex {index:03}", "b", priority=1, service_class="flex")
    begun = [server.serve(1.0, wait_s=1.0) for _ in range(300)]
    assert 0.15 <= sum(name.startswith("flex") for name in begun[100:]) / 200 <= 0.25


def test_beyond_the_bound_the_longest_idle_tenant_is_forgotten_and_active_ones_are_not() -> None:
    shares = FairShares(replace(CONFIG, max_tenants=3))
    for index in range(50):
        shares.add(str(index), f"t{index}", "default", 0, 1.0, 0.0)
    assert shares.num_tenants == 3
    for index in range(50):
        shares.end(str(index), 0.0)
    shares.add("new", "new", "default", 0, 1.0, 0.0)
    assert set(shares.served()) == {"t1", "t2", "new"}
    assert len(shares) == 1


def test_two_ingresses_that_share_counters_treat_a_tenant_as_one() -> None:
    here, there = FairShares(CONFIG), FairShares(CONFIG)
    here.add("a", "t", "default", 0, 4.0, 0.0)
    here.begin("a", 0.0)
    total = {name: floor + delta for name, (delta, floor) in here.take_usage().items()}
    there.add("b", "t", "default", 0, 1.0, 0.0)
    there.merge(total, here.least_active())
    assert there.served() == {"t": 4.0}
    assert there.tend(0.0)["b"] == Order(0, 4.0)


def flooded() -> FairShares:
    """Ten requests of a flood have begun, twenty wait, and so does one of a guest."""
    shares = FairShares(CONFIG)
    shares.add("guest 0", "guest", "default", 0, 1.0, 0.0)
    for index in range(30):
        shares.add(f"flood {index:02}", "flood", "default", 0, 1.0, 0.0)
    for index in range(10):
        shares.begin(f"flood {index:02}", 0.1 * index)
    return shares


def test_a_tenant_ahead_of_its_share_comes_after_equally_urgent_ones_also_where_it_runs() -> None:
    shares = flooded()
    changed = shares.tend(1.0)
    assert len(changed) == 30 and {order.band for order in changed.values()} == {told_band(0, is_ahead=True)}
    [(_, guest)] = shares.add("guest 1", "guest", "default", 0, 1.0, 1.0).items()
    assert guest < min(changed.values()) and guest.band < changed["flood 03"].band
    urgent = shares.add("urgent", "flood", "default", -1, 1.0, 1.0)["urgent"]
    assert urgent < guest, "priorities are heeded across tenants"


def begun(*tenants: str, num_slots: int) -> FairShares:
    """One request of each runs. While there was room for all, they cost 10, 9, 8 ... seconds in this order."""
    shares = FairShares(CONFIG)
    shares.tend(0.0, is_short=False, num_slots=num_slots)
    for index, name in enumerate(tenants):
        shares.add(f"{name} 0", name, "default", 0, 1.0, 0.0)
        shares.charge(f"{name} 0", 10.0 - index, 1.0)
    assert not any(order.band for order in shares.tend(1.0, is_short=False, num_slots=num_slots).values())
    return shares


def test_where_places_have_just_run_out_the_tenant_that_was_served_most_gives_way() -> None:
    shares = begun("flood", "other", num_slots=2)
    orders = shares.add("guest 0", "guest", "default", 0, 1.0, 1.1)
    assert orders["flood 0"].band == told_band(0, is_ahead=True) and "other 0" not in orders
    assert orders["guest 0"].band == told_band(0, is_ahead=False)
    again = shares.add("late 0", "late", "default", 0, 1.0, 1.2)
    assert again.keys() == {"late 0"}, "one gives way already"


@pytest.mark.parametrize(("num_slots", "estimate_s"), [(3, 1.0), (0, 1.0), (2, 9.0)])
def test_no_tenant_gives_way_while_there_is_room_or_to_one_that_asks_for_as_much(
    num_slots: int, estimate_s: float
) -> None:
    shares = begun("flood", "other", num_slots=num_slots)
    assert shares.add("guest 0", "guest", "default", 0, estimate_s, 1.1).keys() == {"guest 0"}


def test_a_tenant_that_comes_back_is_not_ahead_because_it_was_when_it_left() -> None:
    shares = FairShares(CONFIG)
    shares.add("guest 0", "guest", "default", 0, 1.0, 0.0)
    for index in range(20):
        shares.add(f"flood {index:02}", "flood", "default", 0, 1.0, 0.0)
        shares.begin(f"flood {index:02}", 0.0)
    assert shares.tend(1.0)["flood 00"].band == told_band(0, is_ahead=True)
    for index in range(20):
        shares.end(f"flood {index:02}", 1.0)
    back_s = 100.0  # what it was served is long forgotten
    assert shares.add("flood 20", "flood", "default", 0, 1.0, back_s)["flood 20"].band == told_band(0, is_ahead=False)


def test_a_guest_that_asks_for_much_at_once_is_no_equal_of_a_flood() -> None:
    """Its lead is beyond its share of three, and the flood was served far more lately."""
    shares = FairShares(CONFIG)
    for name, number in (("idle", 1), ("flood", 30), ("guest", 10)):
        for index in range(number):
            shares.add(f"{name} {index:02}", name, "default", 0, 1.0, 0.0)
    for index in range(14):
        shares.begin(f"flood {index:02}", 0.1 * index)
    for index in range(9):
        shares.begin(f"guest {index:02}", 0.1 * index)
    shares.tend(1.4)
    assert shares._leads.is_ahead("guest", 1.0, 1.4), "by its lead alone"
    assert shares.order("guest 09") < shares.order("flood 20")
    assert shares.order("guest 00").band == told_band(0, is_ahead=False)


def test_a_flood_keeps_no_place_by_its_age() -> None:
    """What was lifted has begun, which was due; from then on guests come before it."""
    shares = flooded()
    shares.end("guest 0", 1.0)
    for second in range(1, 10):
        shares.tend(float(second))
    shares.add("guest 1", "guest", "default", 0, 1.0, 9.5)
    lifted = [name for name, order in shares.tend(10.0).items() if order.band == LIFTED]
    assert lifted == ["flood 10"]
    shares.begin("flood 10", 10.1)
    assert shares.tend(10.2)["flood 10"].band == told_band(0, is_ahead=True)
    assert shares.tend(10.3) == {}


def test_a_lifted_request_that_begins_and_has_another_priority_is_told_with_the_new_one() -> None:
    shares = flooded()
    shares.end("guest 0", 0.5)
    for second in range(1, 10):
        shares.tend(float(second))
    shares.add("guest 1", "guest", "default", 0, 1.0, 9.5)
    shares.tend(10.0)
    assert shares.order("flood 10").band == LIFTED
    shares.begin("flood 10", 10.1)
    shares.prioritize("flood 10", 3)
    assert shares.tend(10.2)["flood 10"].band == told_band(3, is_ahead=True)


def test_what_was_lifted_first_begins_first() -> None:
    """Not what came first: a class that is lifted for its share would pass others for as long as any is older."""
    shares = FairShares(CONFIG)
    for index in range(12):
        shares.add(f"flex {index:02}", "flood", "flex", 1, 0.1, 0.0)
    shares.add("usual", "flood", "default", 0, 5.0, 1.0)
    for index in range(12):
        orders = {name: order for name, order in shares.tend(11.0 + index).items() if order.band == LIFTED}
        for order in orders.values():
            assert order.tag == 11.0 + index


def test_what_a_tenant_is_charged_at_another_ingress_counts_here() -> None:
    shares = FairShares(CONFIG)
    for name in ("guest", "flood"):
        shares.add(name, name, "default", 0, 1.0, 0.0)
    shares.merge({"flood": 500.0, "guest": 500.0}, None)
    assert {order.band for order in shares.tend(0.1).values()} == {0}, "what was long ago is no lead"
    shares.merge({"flood": 540.0, "guest": 501.0}, None)
    assert shares.tend(0.2)["flood"].band == told_band(0, is_ahead=True)
    assert shares.order("guest") == Order(0, 501.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 5.0), st.floats(0.0, 9.0)), min_size=1, max_size=60))
def test_a_counter_is_what_its_tenant_cost(costs: list[tuple[str, float, float]]) -> None:
    shares = FairShares(CONFIG)
    for index, (tenant, estimate_s, _) in enumerate(costs):
        shares.add(str(index), tenant, "default", 0, estimate_s, 0.0)
    for index, (_, _, cost_s) in enumerate(costs):
        shares.begin(str(index), 0.0)
        shares.charge(str(index), cost_s / 2, 0.0)
        shares.charge(str(index), cost_s / 2, 0.0)
        shares.end(str(index), 0.0)
    for tenant, counter in shares.served().items():
        assert counter == pytest.approx(sum(cost for name, _, cost in costs if name == tenant), abs=1e-6)


class NoStarvation(RuleBasedStateMachine):
    """One place, which begins the least order at every tick; requests of all kinds come, change and go."""

    TICK_S = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.server = Server()
        self.came: dict[str, tuple[float, int]] = {}  # when, and how many of its class waited then
        self.classes: dict[str, str] = {}
        self.number = 0

    @rule(
        tenant=st.sampled_from(["flood", "b", "c"]),
        service_class=st.sampled_from(sorted(CLASSES)),
        priority=st.integers(-3, 3),
        cost_s=st.sampled_from([0.1, 1.0, 7.0]),
        count=st.integers(1, 8),
    )
    def come(self, tenant: str, service_class: str, priority: int, cost_s: float, count: int) -> None:
        for _ in range(count):
            name = f"{self.number:05}"
            self.number += 1
            ahead = sum(found == service_class for found in self.classes.values())
            self.came[name] = self.server.now_s, ahead
            self.classes[name] = service_class
            self.server.add(name, tenant, cost_s, priority, service_class)

    @precondition(lambda self: self.server.orders)
    @rule(cost_s=st.sampled_from([None, 0.2, 12.0]), num=st.integers(1, 40))
    def serve(self, cost_s: float | None, num: int) -> None:
        for _ in range(min(num, len(self.server.orders))):
            name = self.server.serve(cost_s, wait_s=self.TICK_S)
            self._left(name)
            self.nothing_waits_longer_than_the_bound()

    @precondition(lambda self: self.server.orders)
    @rule(data=st.data(), priority=st.integers(-3, 3))
    def change(self, data: st.DataObject, priority: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.server.orders)))
        self.server.orders |= self.server.shares.prioritize(name, priority)

    @precondition(lambda self: self.server.orders)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.server.orders)))
        del self.server.orders[name]
        self.server.shares.end(name, self.server.now_s)
        self._left(name)

    def _left(self, name: str) -> None:
        del self.came[name], self.classes[name]

    @invariant()
    def nothing_waits_longer_than_the_bound(self) -> None:
        for came_s, ahead in self.came.values():
            places_s = 2 * len(CLASSES) * self.TICK_S  # for those that are lifted at the same time
            assert self.server.now_s - came_s <= (ahead + 1) * CONFIG.age_s + places_s

    @invariant()
    def the_queue_and_the_planner_agree(self) -> None:
        shares = self.server.shares
        assert len(shares) == len(self.server.orders)
        shares_orders = {name: shares.order(name) for name in self.server.orders}
        self.server.orders |= {i: o for i, o in shares.tend(self.server.now_s).items() if i in self.server.orders}
        assert {name: shares.order(name) for name in shares_orders} == self.server.orders

    @invariant()
    def no_more_are_lifted_than_have_places(self) -> None:
        lifted = [name for name, order in self.server.orders.items() if order.band == LIFTED]
        assert len(lifted) <= len(BUILT_IN_CLASSES) + len(self.server.orders) * self.server.now_s / CONFIG.age_s


TestNoStarvation = NoStarvation.TestCase
TestNoStarvation.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
