"""Laws of late prompts: those that can be in time begin first, late ones keep a share, and nothing else is changed."""

from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.late_prompts import COST, IN_TIME, LATE, PERIOD_S, TURN, LateOrder, Place, Waiting


def waits(name: str, gone: float, time_s: float, *, band: int = 0, has_begun: bool = False) -> Waiting:
    return Waiting(name, gone, time_s, band, has_begun)


def names(waiting: list[Waiting], places: list[Place]) -> list[str]:
    return [waiting[place.at].request_id for place in places]


@st.composite
def queues(draw: st.DrawFn) -> list[Waiting]:
    """What waits, as it came; one in three has no SLO for its first token."""
    shares = st.one_of(st.just(0.0), st.floats(0, 4), st.floats(0, 4))
    found = draw(st.lists(st.tuples(shares, st.integers(-1, 1), st.integers(0, 9)), max_size=12))
    return [
        waits(f"r{at}", 0.0 if begun == 9 else gone, float(at), band=band, has_begun=begun == 9)
        for at, (gone, band, begun) in enumerate(found)
    ]


def test_nothing_is_ordered_before_the_first_that_waits_is_very_late() -> None:
    order = LateOrder()
    assert not order.is_due(10.0, LATE - 0.01) and order.is_due(10.0, LATE)


def test_those_that_can_be_in_time_come_first_each_in_the_order_of_arrival() -> None:
    waiting = [waits("a", 3.0, 1.0), waits("b", 0.9, 2.0), waits("c", 0.5, 3.0), waits("d", 0.0, 4.0)]
    order = LateOrder()
    assert names(waiting, order.order(waiting, by_priority=False)) == ["c", "d", "a", "b"] and order.is_changed


def test_late_ones_have_their_turn() -> None:
    waiting, order = [waits("late", 3.0, 1.0), waits("new", 0.1, 2.0)], LateOrder()
    firsts = [names(waiting, order.order(waiting, by_priority=False))[0] for _ in range(3 * TURN)]
    assert firsts == (["new"] * (TURN - 1) + ["late"]) * 3


def test_when_none_is_late_any_more_the_order_is_that_of_arrival_again() -> None:
    waiting, order = [waits("late", 3.0, 1.0), waits("a", 0.1, 2.0), waits("b", 0.2, 3.0)], LateOrder()
    for by_priority in (False, True):
        places = order.order(waiting, by_priority=by_priority)
        assert order.is_due(1.0, 0.0), "it must be put back"
        left = [
            waiting[place.at]._replace(time_s=place.time_s if by_priority else waiting[place.at].time_s)
            for place in places
        ]
        left = [request for request in left if request.request_id != "late"]
        back = order.order(left, by_priority=by_priority)
        assert names(left, back) == ["a", "b"] and not order.is_changed
        assert not by_priority or [place.time_s for place in back] == [2.0, 3.0]


def test_one_that_got_another_time_from_elsewhere_stands_there() -> None:
    waiting, order = [waits("late", 3.0, 1.0), waits("new", 0.1, 2.0)], LateOrder()
    places = order.order(waiting, by_priority=True)
    assert [place.time_s for place in places] == [1.0, 2.0] and names(waiting, places) == ["new", "late"]
    told = [waits("late", 3.0, 0.5), waits("new", 0.1, 1.0)]  # "late" was given 2.0, and a new tag came for it
    for _ in range(TURN - 1):
        places = order.order(told, by_priority=True)
        told = [told[place.at]._replace(time_s=place.time_s) for place in places]
    assert [request.request_id for request in told] == ["late", "new"]
    assert [place.time_s for place in places] == [0.5, 2.0]


def test_long_queues_are_ordered_less_often() -> None:
    order = LateOrder()
    order.rest(5.0, took_s=0.0)
    assert not order.is_due(5.0 + 0.9 * PERIOD_S, LATE) and order.is_due(5.0 + PERIOD_S, LATE)
    order.rest(5.0, took_s=0.02)
    assert not order.is_due(5.0 + 0.9 * 0.02 / COST, LATE) and order.is_due(5.0 + 0.02 / COST, LATE)


@given(queues(), st.booleans(), st.integers(0, TURN))
def test_an_order_is_one_of_all_and_none_passes_one_that_is_in_time(
    waiting: list[Waiting], by_priority: bool, num_before: int
) -> None:
    order = LateOrder()
    for _ in range(num_before):
        order.order([], by_priority=by_priority)
    places = order.order(waiting, by_priority=by_priority)
    assert sorted(place.at for place in places) == list(range(len(waiting)))
    found = [waiting[place.at] for place in places]
    for at, request in enumerate(found):
        for behind in found[at + 1 :]:
            came_later = request.time_s > behind.time_s
            if by_priority:
                assert request.band <= behind.band
                came_later = came_later and request.band == behind.band
            elif request.has_begun or behind.has_begun:
                assert request.has_begun or not behind.has_begun or not order.is_changed
                continue
            if came_later:
                assert behind.gone > IN_TIME >= request.gone and order.is_changed
    if by_priority:
        times = [(waiting[place.at].band, place.time_s) for place in places]
        assert times == sorted(times) and sorted(times) == sorted((r.band, r.time_s) for r in waiting)


def test_under_twice_the_load_most_of_what_is_served_is_in_time_and_no_late_one_starves() -> None:
    """One prompt is served in a tick, and two come; each wants its first token within 20 ticks."""
    waiting, order = list[tuple[int, str]](), LateOrder()
    in_time, oldest = 0, list[int]()
    for tick in range(1000):
        waiting += [(tick, f"{tick}a"), (tick, f"{tick}b")]
        state = [waits(name, (tick - came) / 20, float(came)) for came, name in waiting]
        if order.is_due(float(tick), state[0].gone):
            waiting = [waiting[place.at] for place in order.order(state, by_priority=False)]
        came, _ = waiting.pop(0)
        in_time += tick - came <= 20
        oldest.append(min(came for came, _ in waiting))
    assert in_time > 700, "first come, first served: 40"
    assert oldest[-1] > 1000 / (2 * TURN) - 20, "a fourth of what is served are the oldest"


def test_no_two_of_a_band_have_one_time() -> None:
    """vLLM would order them by their ids: here a late one that has got its time back, and one that has it as well."""
    waiting = [
        Waiting("a", gone=LATE, time_s=6.0),
        Waiting("b", gone=0.0, time_s=6.0, has_begun=True),
        Waiting("c", gone=0.0, time_s=6.0, band=1),
    ]
    places = LateOrder().order(waiting, by_priority=True)
    assert [waiting[place.at].request_id for place in places] == ["b", "a", "c"]
    assert 6.0 == places[0].time_s < places[1].time_s < 6.000001 and places[2].time_s == 6.0
