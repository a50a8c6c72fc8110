"""Laws of chunk shares: urgent prompts are read first, others go on all the same, one band is left alone."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from pengserve.planners.chunk_share import MIN_TOKENS, SHORT_STEP, TURN_STEPS, Chunks, Prompt, plan_chunks

STEP = 512


def prompt(name: str, band: int, num_tokens: int, *, passed: int = 0, running: bool = True) -> Prompt:
    return Prompt(request_id=name, band=band, num_tokens=num_tokens, num_passed=passed, is_running=running)


prompts = st.lists(
    st.builds(
        Prompt,
        request_id=st.uuids().map(str),
        band=st.integers(-1, 3),
        num_tokens=st.integers(1, 3000),
        num_passed=st.integers(0, TURN_STEPS - 1),
        is_running=st.booleans(),
    ),
    max_size=8,
)


def test_prompts_of_one_band_are_left_to_vllm() -> None:
    assert plan_chunks([prompt("a", 1, 900), prompt("b", 1, 40)], 1, 7, STEP) == Chunks()
    assert plan_chunks([], 0, 7, STEP) == Chunks()


def test_a_long_prompt_is_passed_over_while_an_urgent_one_is_read() -> None:
    plan = plan_chunks([prompt("flood", 1, 900), prompt("guest", 0, 40, running=False)], 0, 3, STEP)
    assert plan == Chunks(passed=frozenset({"flood"}), max_tokens=3 + 40)


def test_a_long_prompt_is_read_in_short_steps_while_urgent_ones_come_now_and_then() -> None:
    assert plan_chunks([prompt("flood", 1, 900)], 0, 3, STEP) == Chunks(max_tokens=3 + STEP // SHORT_STEP)
    assert plan_chunks([prompt("flood", 1, 900)], 1, 3, STEP) == Chunks()


@given(prompts, st.integers(-1, 3), st.integers(0, 32), st.integers(64, 4096))
def test_a_step_always_reads_something_of_the_most_urgent_and_never_more_than_it_may(
    found: list[Prompt], most_urgent: int, num_decoding: int, step_tokens: int
) -> None:
    plan = plan_chunks(found, most_urgent, num_decoding, step_tokens)
    first = min((each.band for each in found), default=0)
    assert not plan.is_turn
    assert not plan.passed & {each.request_id for each in found if each.band == first or not each.is_running}
    assert plan.max_tokens is None or plan.max_tokens <= step_tokens
    if found and plan.max_tokens is not None:
        assert plan.max_tokens >= min(step_tokens, num_decoding + 1)


@given(prompts, st.integers(0, 32), st.integers(64, 4096))
def test_a_turn_is_one_prompt_s_that_waited_longest(found: list[Prompt], num_decoding: int, step_tokens: int) -> None:
    plan = plan_chunks(found, -1, num_decoding, step_tokens, TURN_STEPS - 1)
    first = min((each.band for each in found), default=0)
    behind = [each for each in found if each.is_running and each.band > first]
    assert plan.is_turn is bool(behind)
    if plan.is_turn:
        (turn,) = [each for each in found if each.is_running and each.request_id not in plan.passed]
        assert turn in behind and turn.num_passed == max(each.num_passed for each in behind)
        assert plan.max_tokens is not None and plan.max_tokens > min(num_decoding, step_tokens - 1)


class Reading(RuleBasedStateMachine):
    """Prompts that come and are read. Each that runs is read in time, also while urgent ones keep coming."""

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, Prompt] = {}
        self.unread: dict[str, tuple[int, int]] = {}  # steps since it was read last, and prompts that ran meanwhile
        self.num_passing = 0

    @rule(bands=st.lists(st.integers(-1, 2), min_size=1, max_size=3), num_tokens=st.integers(1, 3000))
    def come(self, bands: list[int], num_tokens: int) -> None:
        for band in bands:
            if len(self.left) < 8:
                name = f"{len(self.unread)}"
                self.left[name] = prompt(name, band, num_tokens)
                self.unread[name] = (0, 1)

    @rule(count=st.integers(1, 60), is_busy=st.booleans())
    def step(self, count: int, is_busy: bool) -> None:
        for _ in range(count):
            if is_busy and not any(each.band == -1 for each in self.left.values()):
                self.come([-1], STEP)
            self._step()
            self._check()

    def _step(self) -> None:
        found = list(self.left.values())
        plan = plan_chunks(found, min((p.band for p in found), default=0), 0, STEP, self.num_passing)
        self.num_passing = self.num_passing + 1 if plan.passed and not plan.is_turn else 0
        room = plan.max_tokens if plan.max_tokens is not None else STEP
        for each in sorted(found, key=lambda p: p.band):
            steps, most = self.unread[each.request_id]
            if each.request_id in plan.passed:
                self.left[each.request_id] = replace(each, num_passed=each.num_passed + 1)
                self.unread[each.request_id] = (steps + 1, max(most, len(found)))
                continue
            read = min(room, each.num_tokens)
            room -= read
            self.left[each.request_id] = replace(each, num_tokens=each.num_tokens - read, num_passed=0)
            self.unread[each.request_id] = (0, 1)
            if read == each.num_tokens:
                del self.left[each.request_id]

    def _check(self) -> None:
        """None is passed over for longer than the bound."""
        for name in self.left:
            steps, most = self.unread[name]
            assert steps <= most * TURN_STEPS, f"{name} was passed over in {steps} steps, among {most} prompts"


TestReading = Reading.TestCase


@given(st.integers(17, 5000), st.integers(1, 1000))
def test_a_prompt_goes_on_below_an_endless_line_of_urgent_ones_that_are_being_read(length: int, urgent: int) -> None:
    left, passing, steps = length, 0, 0
    while left > 0:
        plan = plan_chunks([prompt("flood", 1, left, passed=passing), prompt("guest", 0, urgent)], 0, 0, STEP, passing)
        if "flood" in plan.passed:
            passing += 1
        else:
            assert "guest" in plan.passed and plan.max_tokens is not None, "the urgent one would take all of the step"
            left, passing = left - plan.max_tokens, 0
        steps += 1
        assert steps <= TURN_STEPS * (-(-length // MIN_TOKENS))
