"""Requests that move between instances: whatever comes first, a stream is whole, and nothing in it comes twice."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pengserve.cluster.ingress.config import LimitConfig
from pengserve.cluster.ingress.in_flight import records
from pengserve.cluster.ingress.request.moves import MAX_STASHED, Orphans
from pengserve.planners.types.ids import InstanceKey
from tests.support.effort import examples
from tests.support.moving import Cluster, FakeInstance, FakeLink

NUM_INSTANCES = 3

slots = st.integers(0, NUM_INSTANCES - 1)
hops = st.sampled_from([(a, b) for a in range(NUM_INSTANCES) for b in range(NUM_INSTANCES) if a != b])


class Moving(RuleBasedStateMachine):
    """One ingress, three instances, and every order of what can happen between them."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(NUM_INSTANCES)
        self.aborted: set[int] = set()
        for instance in self.cluster.instances:
            self.cluster.connect(instance)

    @initialize(lengths=st.lists(st.integers(2, 12), min_size=2, max_size=4))
    def begin(self, lengths: list[int]) -> None:
        for length in lengths:
            self.ask(length)
        for instance in self.cluster.instances:
            _read_all(instance)

    @rule(length=st.integers(1, 12))
    @precondition(lambda self: len(self.cluster.lengths) < 6)
    def ask(self, length: int) -> None:
        self.cluster.request(len(self.cluster.lengths), length)

    @rule(slot=slots, does_read=st.booleans())
    def step(self, slot: int, does_read: bool) -> None:
        instance = self.cluster.instances[slot]
        if does_read:
            _read_all(instance)
        instance.step()

    @rule(slot=slots)
    def instance_reads_a_frame(self, slot: int) -> None:
        link = self.cluster.instances[slot].link
        if link is not None:
            link.read()

    @rule(slot=slots, times=st.integers(1, 8))
    def ingress_reads(self, slot: int, times: int) -> None:
        for _ in range(times):
            link = self.cluster.open_links.get(self.cluster.instances[slot].key)
            if link is not None:
                self.cluster.deliver(link)

    @rule(hop=hops, data=st.data())
    def carry(self, hop: tuple[int, int], data: st.DataObject) -> None:
        source, target = (self.cluster.instances[slot] for slot in hop)
        if source.link is None or target.link is None or not source.copies:
            return
        source.carry(target, data.draw(_some(source)))

    @rule(slot=slots, to=st.none() | slots, data=st.data())
    def redirect(self, slot: int, to: int | None, data: st.DataObject) -> None:
        source = self.cluster.instances[slot]
        if source.link is None or not source.copies:
            return
        source.redirect(data.draw(_some(source)), None if to is None else self.cluster.instances[to].key)

    @rule(hop=hops, data=st.data(), num_delivered=st.integers(0, 3), is_source=st.booleans(), refuses=st.booleans())
    def carry_and_cut(
        self, hop: tuple[int, int], data: st.DataObject, num_delivered: int, is_source: bool, refuses: bool
    ) -> None:
        """What hurts most: one of the two is gone before the ingress has heard of the move."""
        self.carry(hop, data)
        for instance in (self.cluster.instances[slot] for slot in hop):
            _read_all(instance)
            instance.step()
        victim = self.cluster.instances[hop[0] if is_source else hop[1]]
        if victim.link is not None:
            victim.cut(num_delivered, refuses=refuses)

    @rule(slot=slots, num_delivered=st.integers(0, 5), refuses=st.booleans(), dies=st.booleans())
    def cut(self, slot: int, num_delivered: int, refuses: bool, dies: bool) -> None:
        instance = self.cluster.instances[slot]
        if instance.link is None:
            return
        instance.cut(num_delivered, refuses=refuses)
        instance.is_alive = not dies

    @rule(slot=slots)
    def come_back(self, slot: int) -> None:
        _come_back(self.cluster, slot)

    @rule(slot=slots)
    def change_routes(self, slot: int) -> None:
        self.cluster.pool.routes ^= {self.cluster.instances[slot].key}

    @rule(number=st.integers(0, 5))
    def client_goes_away(self, number: int) -> None:
        if number in self.cluster.lengths and number not in self.cluster.ended:
            self.aborted.add(number)
            self.cluster.abort(number)

    @rule()
    def tend(self) -> None:
        self.cluster.book.tend()

    @invariant()
    def a_request_is_in_one_place_or_waits(self) -> None:
        book = self.cluster.book
        on_links = [record for record in book._records.values() if record.link is not None]
        assert {id(r) for r in on_links} == {id(r) for r in book._copies.records.values()}
        waiting = {id(r) for r in book._waiting}
        assert all(id(r) in waiting for r in book._records.values() if r.link is None)
        live = {n for n in self.cluster.lengths if n not in self.cluster.ended}
        assert {f"r{n}" for n in live} == set(book._records)
        assert not self.cluster.failed

    def teardown(self) -> None:
        for slot in range(NUM_INSTANCES):
            link = self.cluster.open_links.get(self.cluster.instances[slot].key)
            while link is not None and link.to_ingress:
                self.cluster.deliver(link)
            _come_back(self.cluster, slot)
            self.cluster.pool.routes.add(self.cluster.instances[slot].key)
        self.cluster.settle(rounds=40)
        for number, seen in self.cluster.seen.items():
            assert number in self.cluster.ended
            assert number in self.aborted or len(seen) == self.cluster.lengths[number]
        assert len(self.cluster.book) == 0
        assert not self.cluster.book._copies.records and not self.cluster.book._waiting
        assert not any(instance.copies for instance in self.cluster.instances), "no instance computes for nobody"


def _some(instance: FakeInstance) -> Any:
    return st.lists(st.sampled_from(sorted(instance.copies)), min_size=1, unique=True)


def _read_all(instance: FakeInstance) -> None:
    while instance.link is not None and instance.link.to_instance:
        instance.link.read()


def _come_back(cluster: Cluster, slot: int) -> None:
    """The ingress connects again: to the same life if only the connection broke, else to the next."""
    instance = cluster.instances[slot]
    if instance.key in cluster.open_links or instance.link is not None:
        return
    if not instance.is_alive:
        key = InstanceKey(instance_id=instance.key.instance_id, incarnation=instance.key.incarnation + 1)
        instance = cluster.instances[slot] = FakeInstance(key, cluster.lengths)
    cluster.connect(instance)


TestMoving = Moving.TestCase
TestMoving.settings = settings(max_examples=examples(500), stateful_step_count=40)


@pytest.fixture
def pair() -> tuple[Cluster, FakeLink, FakeLink]:
    """Two instances; a first request runs on the first."""
    cluster = Cluster(2)
    first = cluster.connect(cluster.instances[0])
    cluster.request(1, 6)
    first.read()
    cluster.instances[0].step()
    return cluster, first, cluster.connect(cluster.instances[1])


def test_tokens_that_overtake_their_moved_count_when_it_comes(pair: tuple[Cluster, FakeLink, FakeLink]) -> None:
    cluster, first, second = pair
    cluster.instances[0].carry(cluster.instances[1], ["r1"])
    cluster.instances[1].step()
    cluster.instances[1].step()
    while second.to_ingress:
        cluster.deliver(second)
    assert cluster.seen[1] == []
    cluster.deliver(first)
    assert len(cluster.seen[1]) == 1
    cluster.deliver(first)
    assert len(cluster.seen[1]) == 3
    assert ("moved", True) in cluster.log and any(kind == "switched" for kind, _ in cluster.log)
    assert not any(kind == "resumed" for kind, _ in cluster.log)


def test_the_copy_of_a_dead_instance_s_request_is_aborted_where_it_was_carried(
    pair: tuple[Cluster, FakeLink, FakeLink],
) -> None:
    cluster, first, second = pair
    cluster.instances[0].carry(cluster.instances[1], ["r1"])
    cluster.instances[0].cut(0, refuses=True)
    cluster.deliver(first)
    assert list(cluster.book._copies.records) == ["r1~2"]
    cluster.instances[1].step()
    cluster.deliver(second)
    assert second.aborts == [["r1"]]
    cluster.instances[1].step()
    cluster.deliver(second)
    assert second.aborts == [["r1"]], "told once"
    cluster.settle()
    assert len(cluster.seen[1]) == 6


def test_a_request_carried_to_a_link_that_broke_since_is_resumed(pair: tuple[Cluster, FakeLink, FakeLink]) -> None:
    cluster, _, second = pair
    cluster.instances[0].carry(cluster.instances[1], ["r1"])
    cluster.instances[1].cut(0, refuses=True)
    cluster.deliver(second)
    cluster.connect(cluster.instances[1])  # the same life: it forgot the request when its client went away
    cluster.settle()
    assert len(cluster.seen[1]) == 6
    assert any(kind == "resumed" for kind, _ in cluster.log)


def test_a_redirected_request_goes_where_it_is_sent_though_that_is_no_route(
    pair: tuple[Cluster, FakeLink, FakeLink],
) -> None:
    cluster, first, second = pair
    cluster.pool.routes.discard(second.key)
    cluster.instances[0].redirect(["r1"], second.key)
    cluster.deliver(first)
    cluster.deliver(first)
    second.read()
    assert list(cluster.instances[1].copies) == ["r1~2"]
    assert cluster.log[-2:] == [("moved", False), ("dispatched", second.key)], "moved, and not counted as resumed"


@pytest.mark.parametrize("is_leaving", [True, False])
def test_what_a_drained_instance_hands_back_counts_as_resumed_for_that_reason(
    pair: tuple[Cluster, FakeLink, FakeLink], is_leaving: bool
) -> None:
    cluster, first, second = pair
    if is_leaving:
        cluster.pool.leaving.add(first.key)
    cluster.instances[0].redirect(["r1"], None)
    while first.to_ingress:
        cluster.deliver(first)
    second.read()
    assert list(cluster.instances[1].copies) == ["r1~2"]
    assert [resumed.why for resumed in cluster.resumptions] == (["drained"] if is_leaving else [])
    cluster.instances[1].step()
    cluster.instances[1].cut(0, refuses=False)
    while second.to_ingress:
        cluster.deliver(second)
    cluster.connect(cluster.instances[1])
    cluster.book.tend()
    assert cluster.resumptions[-1].why == "lost"


def test_a_redirected_request_avoids_who_sent_it_away(pair: tuple[Cluster, FakeLink, FakeLink]) -> None:
    cluster, first, second = pair
    cluster.pool.routes.discard(second.key)
    cluster.instances[0].redirect(["r1"], None)
    cluster.deliver(first)
    cluster.deliver(first)
    assert cluster.book.num_waiting == 1
    cluster.book.tend()
    assert cluster.book.num_waiting == 0, "but for a while only: it may be the last one there is"


def test_redirects_do_not_count_as_losses_nor_spin(pair: tuple[Cluster, FakeLink, FakeLink]) -> None:
    cluster, first, second = pair
    for _ in range(100):
        for instance, link in zip(cluster.instances, (first, second), strict=True):
            link.read()
            if instance.copies:
                instance.redirect(list(instance.copies), None)
            while link.to_ingress:
                cluster.deliver(link)
    assert cluster.book.num_waiting == 1, "an endless chain waits for the next period"
    assert sum(kind == "moved" for kind, _ in cluster.log) <= records.MAX_REDIRECTS_IN_PLACE + 2
    assert not cluster.failed
    cluster.settle()
    assert len(cluster.seen[1]) == 6


def test_a_moved_that_never_comes_does_not_hold_a_request(pair: tuple[Cluster, FakeLink, FakeLink]) -> None:
    cluster, first, _ = pair
    cluster.instances[0].carry(cluster.instances[1], ["r1"])
    first.to_ingress.pop()
    cluster.instances[1].step()
    cluster.deliver(cluster.open_links[cluster.instances[1].key])
    cluster.passed_s += 60
    cluster.settle()
    assert len(cluster.seen[1]) == 6
    assert not cluster.instances[1].copies


def test_a_stash_is_bounded(pair: tuple[Cluster, FakeLink, FakeLink]) -> None:
    cluster, first, second = pair
    cluster.lengths[1] = 2 * MAX_STASHED
    cluster.instances[0].carry(cluster.instances[1], ["r1"])
    first.to_ingress.pop()
    for _ in range(MAX_STASHED + 1):
        cluster.instances[1].step()
        cluster.deliver(second)
    (record,) = cluster.book._records.values()
    assert record.stash is not None
    cluster.book.tend()
    assert record.stash is None and record.wire_id == "r1~2"


def test_orphans_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pengserve.cluster.ingress.request.moves.MAX_TOLD", 3)
    cluster = Cluster(1)
    link: Any = cluster.connect(cluster.instances[0])
    orphans = Orphans()
    for wire_id in ("a", "b", "a", "c", "d"):
        orphans.abort(link, [wire_id])
    assert link.aborts == [["a"], ["b"], ["c"], ["d"]]
    assert len(orphans._told) == 3


def test_endless_losses_give_a_request_up_and_moves_to_dead_links_count() -> None:
    cluster = Cluster(1, limits=LimitConfig(max_losses=3, max_deaths_alone=10))
    cluster.request(1, 6)
    for _ in range(4):
        link = cluster.connect(cluster.instances[0])
        link.read()
        cluster.instances[0].cut(0, refuses=True)
        cluster.deliver(link)
    assert list(cluster.failed) == ["r1"]
    assert len(cluster.book) == 0
