"""Laws of who is stepped: what is chosen fits, someone always is, the oldest never wait for younger ones."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.residency import Device, Wanting, plan_residency

DEVICE = Device(num_cells=4 * 20, num_reserved=10, num_layers=4, block_size=32, max_tokens=128)


def decoding(name: str, blocks: int, *, parked: bool = False) -> Wanting:
    return Wanting(request_id=name, num_blocks=blocks, num_tokens=1, is_parked=parked)


def prompt(name: str, tokens: int, *, new: bool = True) -> Wanting:
    return Wanting(request_id=name, num_blocks=-(-tokens // 32), num_tokens=tokens, is_new=new)


@st.composite
def requests(draw: st.DrawFn) -> list[Wanting]:
    found = []
    for index in range(draw(st.integers(1, 12))):
        tokens = draw(st.sampled_from([1, 1, 1, 40, 128, 600]))
        blocks = draw(st.integers(1, 30)) if tokens == 1 else -(-tokens // 32)
        is_parked = draw(st.booleans())
        found.append(Wanting(request_id=str(index), num_blocks=blocks, num_tokens=tokens, is_parked=is_parked))
    news = [prompt(f"new {i}", draw(st.integers(2, 900))) for i in range(draw(st.integers(0, 4)))]
    return found + news


@given(requests())
def test_some_request_is_always_stepped(wanting: list[Wanting]) -> None:
    plan = plan_residency(wanting, DEVICE)
    assert plan.stepped or plan.num_new
    assert plan.max_tokens >= 1


@given(requests())
def test_those_that_decode_together_are_whole_on_the_device(wanting: list[Wanting]) -> None:
    plan = plan_residency(wanting, DEVICE)
    chosen = [r for r in wanting if r.request_id in plan.stepped and not r.is_prompt]
    assert len(chosen) <= 1 or sum(r.num_blocks for r in chosen) * DEVICE.num_layers <= DEVICE.num_cells


@given(requests())
def test_of_those_that_decode_the_oldest_are_chosen(wanting: list[Wanting]) -> None:
    plan = plan_residency(wanting, DEVICE)
    chosen = [r.request_id in plan.stepped for r in wanting if not r.is_prompt]
    assert chosen == sorted(chosen, reverse=True)


@given(requests(), st.data())
def test_a_request_that_decodes_gives_way_only_to_requests_that_are_as_urgent(
    wanting: list[Wanting], data: st.DataObject
) -> None:
    """What is less urgent than a request takes no room from it."""
    bands = [data.draw(st.integers(0, 2)) for _ in wanting]
    ranked = [replace(request, band=band) for request, band in zip(wanting, bands, strict=True)]
    ranked.sort(key=lambda request: (request.is_new, request.band))
    plan = plan_residency(ranked, DEVICE)
    for band in range(2):
        urgent = [request for request in ranked if request.band <= band]
        if any(request.is_prompt for request in urgent):
            continue
        assert plan_residency(urgent, DEVICE).stepped <= plan.stepped


def test_a_less_urgent_prompt_takes_no_room_from_those_that_decode() -> None:
    running = [decoding("a", 8), decoding("b", 8)]
    late = replace(prompt("long", 32 * 30), band=1)
    assert plan_residency([*running, late], DEVICE).stepped == {"a", "b"}
    urgent = replace(prompt("long", 32 * 30), band=-1)
    plan = plan_residency([*running, urgent], DEVICE)
    assert plan.num_new == 1 and "b" not in plan.stepped


@given(requests())
def test_the_same_requests_have_the_same_plan(wanting: list[Wanting]) -> None:
    assert plan_residency(wanting, DEVICE) == plan_residency(tuple(wanting), DEVICE)


def test_a_long_prompt_makes_others_wait_and_they_come_back() -> None:
    running = [decoding("a", 8), decoding("b", 8)]
    assert plan_residency(running, DEVICE).stepped == {"a", "b"}
    plan = plan_residency([*running, prompt("long", 32 * 30)], DEVICE)
    assert plan.num_new == 1 and "b" not in plan.stepped
    after = [decoding("a", 8), decoding("b", 8, parked=True)]
    assert plan_residency(after, DEVICE).stepped == {"a", "b"}


def test_a_parked_request_comes_back_only_where_all_can_grow() -> None:
    full = [decoding("a", 10), decoding("b", 10, parked=True)]
    assert plan_residency(full, DEVICE).stepped == {"a"}
    assert plan_residency([decoding("a", 10), decoding("b", 8, parked=True)], DEVICE).stepped == {"a", "b"}


def test_a_prompt_for_which_the_scheduler_has_no_blocks_lets_others_go_on() -> None:
    full = replace(DEVICE, num_free=5)
    plan = plan_residency([decoding("a", 15, parked=True), prompt("new", 32 * 8)], full)
    assert plan.stepped == {"a"} and plan.num_new == 0


def test_a_request_that_never_fits_is_stepped_alone() -> None:
    plan = plan_residency([decoding("huge", 35), decoding("small", 2)], DEVICE)
    assert plan.stepped == {"huge"}


def test_a_shared_prefix_is_on_the_device_once() -> None:
    prefix = tuple(range(7))
    three = [replace(decoding(name, 8), shared=prefix) for name in "abc"]
    assert plan_residency(three, DEVICE).stepped == {"a", "b", "c"}
    assert plan_residency([replace(request, shared=()) for request in three], DEVICE).stepped == {"a", "b"}


def test_a_prefix_that_is_staged_for_a_prompt_is_not_whole_for_others() -> None:
    """A block that is on the device in one layer at a time counts in all layers where it is decoded."""
    prefix = tuple(range(16))
    alone = replace(DEVICE, num_cells=DEVICE.num_layers * 17)
    long = replace(decoding("b", 17), shared=prefix)
    prompts = [replace(prompt("a", 32 * 20), is_new=False, shared=prefix)]
    assert plan_residency([*prompts, long], alone).stepped == {"a"}


def test_layers_that_are_on_the_host_leave_room_for_others_and_for_their_own_turns() -> None:
    """Two requests of 12 blocks in 4 layers and 80 cells; `cells_of` and the layer that stages most are counted."""
    whole = [decoding("a", 12), decoding("b", 12)]
    assert plan_residency(whole, DEVICE).stepped == {"a"}
    away = [replace(r, away=(phase, phase + 2), num_away=11) for r, phase in zip(whole, (0, 1), strict=True)]
    assert plan_residency(away, DEVICE).stepped == {"a", "b"}  # 96 cells without 44, and 11 in turns
    same = [replace(r, away=(1, 3), num_away=11) for r in whole]
    assert plan_residency(same, DEVICE).stepped == {"a", "b"}  # ... and 22 in turns
    assert plan_residency([replace(r, away=(1,), num_away=11) for r in whole], DEVICE).stepped == {"a"}  # 96 again
