"""Laws of short prompts: they overtake long ones, which keep half of each step, all of their memory and their order."""

from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.short_prompts import IN_ORDER, SHORT, Overtaking, Prompt, is_short, plan_overtaking

STEP, ROOM = 512, 10_000  # tokens, blocks


def prompt(name: str, num_tokens: int, *, begun: bool = False, band: int = 0, num_blocks: int | None = None) -> Prompt:
    blocks = -(-num_tokens // 16) if num_blocks is None else num_blocks
    return Prompt(request_id=name, num_tokens=num_tokens, num_blocks=blocks, is_running=begun, band=band)


@st.composite
def lines(draw: st.DrawFn) -> list[Prompt]:
    """Prompts in their order, those that have begun first."""
    sizes = st.one_of(st.integers(1, STEP // SHORT), st.integers(1, 4 * STEP))
    begun, waiting = draw(st.lists(sizes, max_size=5)), draw(st.lists(sizes, max_size=10))
    return [prompt(f"r{i}", size, begun=i < len(begun)) for i, size in enumerate([*begun, *waiting])]


def long_ones(found: list[Prompt]) -> list[Prompt]:
    return [each for each in found if not is_short(each.num_tokens, STEP)]


def test_a_prompt_that_comes_behind_a_long_one_is_read_in_the_next_step() -> None:
    assert plan_overtaking([prompt("long", 900, begun=True), prompt("short", 40)], 3, STEP, ROOM) == Overtaking(
        max_chunk=STEP - 3 - 40
    )
    assert plan_overtaking([prompt("long", 900), prompt("short", 40)], 3, STEP, ROOM) == Overtaking(first=("short",))


def test_prompts_stay_in_their_order_where_all_fit_none_is_long_or_bands_differ() -> None:
    assert plan_overtaking([], 0, STEP, ROOM) == IN_ORDER
    assert plan_overtaking([prompt("long", 400, begun=True), prompt("short", 40)], 3, STEP, ROOM) == IN_ORDER
    assert plan_overtaking([prompt(f"r{i}", 60) for i in range(20)], 3, STEP, ROOM) == IN_ORDER
    assert plan_overtaking([prompt("long", 900), prompt("short", 40, band=1)], 3, STEP, ROOM) == IN_ORDER


def test_a_request_that_decodes_behind_a_long_prompt_has_its_token_in_each_step() -> None:
    assert plan_overtaking([prompt("long", 900, begun=True)], 7, STEP, ROOM) == Overtaking(max_chunk=STEP - 7)


def test_no_prompt_overtakes_a_long_one_that_would_lack_its_blocks() -> None:
    found = [prompt("long", 900, num_blocks=60), prompt("a", 40, num_blocks=3), prompt("b", 40, num_blocks=3)]
    assert plan_overtaking(found, 4, STEP, 60 + 6 + 4).first == ("a", "b")
    assert plan_overtaking(found, 4, STEP, 60 + 6 + 3).first == ("a",)
    assert plan_overtaking(found, 4, STEP, 60 + 2 + 4).first == ()


def test_of_long_prompts_that_have_begun_the_first_goes_on_and_others_where_they_fit() -> None:
    line = [prompt("a", 300, begun=True), prompt("b", 900, begun=True), prompt("short", 60)]
    assert plan_overtaking(line, 0, STEP, ROOM) == Overtaking(max_chunk=STEP - 60, passed=frozenset("b"))
    line[1] = prompt("b", 100, begun=True)
    assert plan_overtaking([*line, prompt("c", 900)], 0, STEP, ROOM) == Overtaking(
        first=(), max_chunk=STEP - 60, passed=frozenset()
    )


def test_a_microbatch_of_few_tokens_counts_as_short_what_any_step_does() -> None:
    found = [prompt("long", 900, begun=True), prompt("short", 60)]
    assert plan_overtaking(found, 0, 200, ROOM, STEP).max_chunk == 200 - 60
    assert plan_overtaking(found, 0, 100, ROOM, STEP).max_chunk == 100, "it would take more than half"


@given(lines(), st.integers(0, 64), st.integers(0, 300))
def test_long_prompts_keep_half_of_each_step_and_all_of_their_memory(
    found: list[Prompt], num_decoding: int, num_free: int
) -> None:
    plan = plan_overtaking(found, num_decoding, STEP, num_free)
    by_id = {each.request_id: each for each in found}
    first, longs, room = [by_id[name] for name in plan.first], long_ones(found), STEP - num_decoding
    assert all(is_short(each.num_tokens, STEP) and not each.is_running for each in first)
    assert first == [each for each in found if each in first], "in the order in which they came"
    assert 2 * sum(each.num_tokens for each in first) <= room
    assert plan.max_chunk is None or room // 2 <= plan.max_chunk <= room
    assert not plan.passed or {each.request_id for each in longs if each.is_running} > plan.passed
    if first:
        waiting = next(each for each in longs if not each.is_running)
        needed = sum(each.num_blocks for each in found if each.is_running or each in first) + waiting.num_blocks
        assert needed + num_decoding <= num_free


@given(lines(), st.integers(0, 64))
def test_what_a_step_reads_is_no_less_than_without(found: list[Prompt], num_decoding: int) -> None:
    """In vLLM's order, with the plan and without; long prompts that are passed over leave room for those that wait."""
    plan, room = plan_overtaking(found, num_decoding, STEP, ROOM), STEP - num_decoding
    begun = [each for each in found if each.is_running and each.request_id not in plan.passed]
    waiting = [each for each in found if not each.is_running]
    waiting.sort(key=lambda each: each.request_id not in plan.first)
    left = room
    for each in [*begun, *waiting]:
        left -= min(left, each.num_tokens, plan.max_chunk or STEP)
    unread = sum(each.num_tokens for each in found) - room
    if not plan.passed and len([each for each in long_ones(found) if each.is_running]) < 2:
        assert left == max(0, -unread)
