"""Over vLLM's own scheduler, without a model: steps are short that a change of shape waits for."""

import contextlib

import pytest

pytest.importorskip("vllm")

from pengserve.planners.short_steps import SHARE
from pengserve.replicas.engine.scheduling.short_steps import ShortSteps
from tests.support.vllm_requests import scheduled_request
from tests.support.vllm_schedulers import capacity_of, give_tokens, scheduler_handle

STEP_TOKENS, FIRST = 128, 128 // SHARE


class Engine:
    """Steps of an instance."""

    def __init__(self) -> None:
        capacity = capacity_of(400, 16, max_num_seqs=8, max_model_len=4000)
        self.handle = scheduler_handle(capacity, max_num_batched_tokens=STEP_TOKENS)
        self.short_steps = ShortSteps(self.handle, begins_short=True)

    def add(self, name: str, num_tokens: int, max_tokens: int = 1) -> None:
        self.handle.add(scheduled_request(name, num_tokens, max_tokens=max_tokens))

    def step(self) -> list[int]:
        """Tokens of each request in one step."""
        with self.short_steps.limiting() or contextlib.nullcontext():
            output = self.handle.schedule()
        give_tokens(self.handle, output)
        return list(output.num_scheduled_tokens.values())


def test_the_first_step_is_short_and_those_after_it_are_whole() -> None:
    engine = Engine()
    for name in ("first", "after"):  # each comes when nothing runs
        engine.add(name, 300)
        assert [engine.step() for _ in range(4)] == [[FIRST], [128], [128], [300 - 256 - FIRST]]
        assert not engine.step()
    assert engine.handle.departures.named()["total_short_first_steps"] == 2


def test_a_prompt_that_fits_into_a_step_is_read_in_one() -> None:
    engine = Engine()
    engine.add("whole", STEP_TOKENS)
    assert engine.step() == [STEP_TOKENS]


def test_no_step_is_short_where_something_runs_or_others_wait() -> None:
    engine = Engine()
    engine.add("one", 300)
    engine.add("other", 300)
    assert engine.step() == [STEP_TOKENS]
    engine = Engine()
    engine.add("answers", 16, max_tokens=20)
    engine.step()
    engine.add("long", 300)
    assert engine.step() == [1, STEP_TOKENS - 1]
    assert engine.short_steps.limiting() is None


def test_a_request_of_which_the_short_step_read_nothing_has_a_whole_one_next() -> None:
    engine = Engine()
    engine.add("indivisible", 300)
    limiting = engine.short_steps.limiting()
    assert limiting is not None, "vLLM chose nothing within it"
    assert engine.step() == [STEP_TOKENS]


def test_while_members_meet_all_that_decodes_goes_on_and_little_is_read() -> None:
    engine = Engine()
    engine.add("long", 300, max_tokens=20)
    engine.add("short", 8, max_tokens=20)
    with engine.handle.chunks_of(100):
        assert engine.step() == [100, 8], "the long one comes first in the batch"
    engine.add("waits", 40)
    engine.short_steps.keep(True)
    assert [engine.step() for _ in range(3)] == [[1, FIRST + 1]] * 3, "the short one decodes before the long one reads"
    engine.short_steps.keep(False)
    assert engine.step() == [1, STEP_TOKENS - 1]


def test_a_step_is_no_longer_while_members_meet_than_before() -> None:
    engine = Engine()
    engine.add("whole", STEP_TOKENS)
    engine.short_steps.keep(True)
    assert [engine.step() for _ in range(2)] == [[FIRST], [FIRST + 1]]
