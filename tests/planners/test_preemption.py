"""Laws of places in a batch: no more than there are, the urgent have them, nothing goes to and fro."""

from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.preemption import AGE_S, QUANTUM_TOKENS, Aged, Candidate, aged_band, plan_places, plan_turns


def running(name: str, band: int, tag: float = 0.0, *, blocks: int = 1, protected: bool = False) -> Candidate:
    return Candidate(request_id=name, band=band, tag=tag, num_blocks=blocks, is_running=True, is_protected=protected)


def parked(name: str, band: int, tag: float = 0.0) -> Candidate:
    return Candidate(request_id=name, band=band, tag=tag, is_parked=True)


def waiting(name: str, band: int, tag: float = 0.0) -> Candidate:
    return Candidate(request_id=name, band=band, tag=tag)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    found = []
    for index in range(draw(st.integers(0, 20))):
        kind = draw(st.sampled_from(["running", "parked", "waiting"]))
        found.append(
            Candidate(
                request_id=str(index),
                band=draw(st.integers(-2, 2)),
                tag=draw(st.floats(0, 9)),
                num_blocks=draw(st.integers(0, 9)),
                is_running=kind == "running",
                is_parked=kind == "parked",
                is_protected=kind == "running" and draw(st.booleans()),
            )
        )
    return found


@given(candidates(), st.integers(1, 12))
def test_places_are_never_more_than_there_are_and_none_stays_free(found: list[Candidate], num_places: int) -> None:
    num_running = sum(each.is_running for each in found)
    plan = plan_places(found, max(num_places, num_running))
    taken = len(plan.placed) + plan.num_new
    assert taken == min(max(num_places, num_running), len(found))


@given(candidates())
def test_no_one_without_a_place_is_more_urgent_than_one_that_could_give_way(found: list[Candidate]) -> None:
    plan = plan_places(found, sum(each.is_running for each in found))
    new = sorted((each for each in found if not each.is_running and not each.is_parked), key=lambda each: each.claim)
    outside = [each for each in found if each.is_parked and each.request_id not in plan.placed] + new[plan.num_new :]
    inside = [e for e in found if e.request_id in plan.placed and e.is_running and not e.is_protected]
    if outside and inside:
        assert min(each.band for each in outside) >= max(each.band for each in inside)


@given(candidates())
def test_who_gives_way_does_so_for_one_that_is_strictly_more_urgent(found: list[Candidate]) -> None:
    plan = plan_places(found, sum(each.is_running for each in found))
    bands = {each.request_id: each.band for each in found}
    came = [bands[i] for i in plan.placed if not next(e for e in found if e.request_id == i).is_running]
    new = sorted((each for each in found if not each.is_running and not each.is_parked), key=lambda each: each.claim)
    came += [each.band for each in new[: plan.num_new]]
    assert len(came) == len(plan.victims)
    for victim, band in zip(sorted(bands[i] for i in plan.victims), sorted(came), strict=True):
        assert victim > band
    assert not any(each.is_protected for each in found if each.request_id in plan.victims)


@given(candidates(), st.integers(1, 12))
def test_what_was_planned_is_planned_again_without_another_change(found: list[Candidate], num_places: int) -> None:
    """No ping-pong: the step after the plan moves nothing."""
    plan = plan_places(found, num_places)
    new = sorted((each for each in found if not each.is_running and not each.is_parked), key=lambda each: each.claim)
    came = plan.placed | {each.request_id for each in new[: plan.num_new]}
    after = [
        Candidate(
            request_id=each.request_id,
            band=each.band,
            tag=each.tag,
            num_blocks=each.num_blocks,
            is_running=each.request_id in came,
            is_parked=each.request_id not in came and (each.is_running or each.is_parked),
            is_protected=each.is_protected,
        )
        for each in found
    ]
    assert plan_places(after, num_places).victims == ()


def test_the_tenant_furthest_ahead_gives_way_and_then_the_least_kv() -> None:
    batch = [running("a", 0, 1.0), running("b", 0, 9.0, blocks=7), running("c", 0, 9.0, blocks=2)]
    assert plan_places([*batch, waiting("urgent", -1)], 3).victims == ("c",)
    assert plan_places([*batch, waiting("urgent", -1), waiting("too", -1)], 3).victims == ("c", "b")
    assert plan_places([*batch, waiting("equal", 0)], 3).victims == ()


def test_one_that_came_back_keeps_its_place() -> None:
    assert QUANTUM_TOKENS > 1
    batch = [running("a", 0), running("b", 1, protected=True)]
    assert plan_places([*batch, waiting("urgent", 0)], 2).victims == ()
    assert plan_places([*batch, waiting("urgent", -1)], 2).victims == ("a",)


def test_a_parked_request_comes_back_before_an_equally_urgent_one_begins() -> None:
    plan = plan_places([running("a", 0), parked("p", 0, 5.0), waiting("w", 0, 1.0)], 2)
    assert plan.placed == {"a", "p"} and plan.num_new == 0
    assert plan_places([running("a", 0), parked("p", 0), waiting("w", -1)], 2).placed == {"a"}


@given(st.integers(-3, 3), st.integers(0, 5))
def test_a_parked_request_has_a_place_after_as_many_seconds_as_there_are_bands_above_it(band: int, above: int) -> None:
    """With any number of more urgent requests: none starves."""
    urgent = [running(str(index), band - above) for index in range(4)]
    urgent += [waiting(f"w{index}", band - above) for index in range(9)]
    old = parked("old", aged_band(band, (above + 1) * AGE_S))
    assert "old" in plan_places([*urgent, old], 4).placed
    young = parked("young", aged_band(band, 0.0))
    assert "young" not in plan_places([*urgent, young], 4).placed or above == 0


@st.composite
def aged(draw: st.DrawFn) -> list[Aged]:
    count = draw(st.integers(0, 12))
    return [
        Aged(
            request_id=str(i),
            band=draw(st.integers(-4, 2)),
            tag=draw(st.floats(0, 9)),
            num_blocks=draw(st.integers(1, 30)),
        )
        for i in range(count)
    ]


@given(aged(), st.integers(0, 12), st.integers(1, 12), st.integers(1, 60))
def test_turns_have_half_of_the_places_and_of_the_device(
    found: list[Aged], split: int, places: int, blocks: int
) -> None:
    under_way, waiting = found[:split], found[split:]
    chosen = plan_turns(waiting, under_way, places, blocks)
    now = [each for each in found if each.request_id in chosen or each in under_way]
    assert not chosen or len(now) <= max(1, places // 2)
    assert len(chosen) <= 1 or sum(each.num_blocks for each in now) <= blocks // 2
    assert not (chosen and under_way) or sum(each.num_blocks for each in now) <= blocks // 2


@given(aged(), st.integers(1, 12), st.integers(1, 60))
def test_the_one_that_has_waited_longest_always_has_the_next_turn(found: list[Aged], places: int, blocks: int) -> None:
    chosen = plan_turns(found, [], places, blocks)
    order = sorted(found, key=lambda each: (each.band, each.tag, each.request_id))
    assert chosen == {each.request_id for each in order[: len(chosen)]}
    assert bool(chosen) == bool(found)
