"""Chunk shares over vLLM's own scheduler, without a model."""

import pytest

pytest.importorskip("vllm")

from pengserve.planners.chunk_share import SHORT_STEP, TURN_STEPS
from pengserve.planners.fairness import LIFTED
from pengserve.replicas.engine.scheduling.chunk_shares import LATELY_S, ChunkShares
from tests.support.vllm_requests import scheduled_request
from tests.support.vllm_schedulers import capacity_of, give_tokens, scheduler_handle

STEP_TOKENS, LONG, SHORT = 128, 800, 20


class Engine:
    """Steps of a scheduler with chunk shares."""

    def __init__(self, *, num_blocks: int = 400, policy: str = "priority") -> None:
        capacity = capacity_of(num_blocks, 16, max_num_seqs=8, max_model_len=4000)
        self.handle, self.now_s = scheduler_handle(capacity, max_num_batched_tokens=STEP_TOKENS, policy=policy), 0.0
        self.chunks = ChunkShares(self.handle, lambda: self.now_s)
        self.step_s = 0.0

    def add(self, name: str, num_tokens: int, band: int, max_tokens: int = 50) -> None:
        request = scheduled_request(name, num_tokens, max_tokens=max_tokens)
        request.priority = band
        self.chunks.note(band)
        self.handle.add(request)

    def step(self) -> dict[str, int]:
        """Tokens of each request in one step."""
        if self.chunks.is_on:
            with self.chunks.step():
                output = self.handle.schedule()
                self.now_s += self.step_s
        else:
            output = self.handle.schedule()
        give_tokens(self.handle, output)
        return dict(output.num_scheduled_tokens)


def test_one_band_is_scheduled_as_vllm_does() -> None:
    engine = Engine()
    engine.add("a", LONG, 1)
    engine.add("b", SHORT, 1)
    assert not engine.chunks.is_on and engine.step() == {"a": STEP_TOKENS}
    first_come = Engine(policy="fcfs")
    first_come.add("a", LONG, 1)
    first_come.add("b", SHORT, 0)
    assert not first_come.chunks.is_on


def test_an_urgent_prompt_that_comes_is_read_at_once_and_alone() -> None:
    engine = Engine()
    engine.add("flood", LONG, 1)
    engine.step()
    engine.add("guest", SHORT, 0)
    assert engine.step() == {"guest": SHORT}, "vLLM would read 128 of the flood's tokens"
    assert engine.handle.departures.by_band == 1
    assert engine.step() == {"guest": 1, "flood": STEP_TOKENS // SHORT_STEP}, "short steps: another guest may come"


def test_once_no_urgent_request_came_for_a_while_steps_are_whole_again() -> None:
    engine = Engine()
    engine.add("guest", SHORT, 0, max_tokens=1)
    engine.add("flood", LONG, 1)
    engine.step()
    assert engine.step() == {"flood": STEP_TOKENS // SHORT_STEP}
    engine.now_s += LATELY_S + 1
    engine.chunks.note(1)
    assert engine.step() == {"flood": STEP_TOKENS} and not engine.chunks.is_on


@pytest.mark.parametrize(("step_s", "num_tokens"), [(0.001, STEP_TOKENS), (0.5, STEP_TOKENS // SHORT_STEP)])
def test_a_prompt_is_cut_only_where_its_step_would_take_long(step_s: float, num_tokens: int) -> None:
    engine = Engine()
    engine.step_s = step_s
    engine.add("guest", SHORT, 0, max_tokens=1)
    engine.add("flood", LONG, 1)
    assert engine.step() == {"guest": SHORT}
    assert engine.step() == {"flood": num_tokens}


def test_requests_that_are_lifted_for_their_age_do_not_cut_prompts() -> None:
    engine = Engine()
    engine.add("old", SHORT, LIFTED, max_tokens=1)
    engine.add("flood", LONG, 1)
    assert engine.step() == {"old": SHORT, "flood": STEP_TOKENS - SHORT}
    engine.add("guest", SHORT, 0)
    assert engine.step() == {"guest": SHORT}, "urgent ones are read at once all the same"


def test_a_flood_goes_on_below_an_endless_line_of_urgent_prompts() -> None:
    engine = Engine()
    engine.add("flood", LONG, 1)
    engine.step()
    progress = []
    for number in range(6 * TURN_STEPS):
        engine.add(f"guest {number}", SHORT, 0, max_tokens=1)
        progress.append(engine.step().get("flood", 0))
    assert sum(map(bool, progress)) >= 5
    assert all(any(progress[i : i + TURN_STEPS + 1]) for i in range(len(progress) - TURN_STEPS))


def test_a_flood_goes_on_below_urgent_prompts_that_are_as_long() -> None:
    """Two of them are being read at any time, so that each step has more urgent tokens than it can compute."""
    engine = Engine(num_blocks=2000)
    engine.add("flood", LONG, 1)
    engine.step()
    left, number, count = LONG - STEP_TOKENS, 0, 0
    while left:
        while sum(r.num_computed_tokens < LONG for r in engine.handle.requests() if r.priority == 0) < 2:
            engine.add(f"guest {number}", LONG, 0, max_tokens=1)
            number += 1
        left -= engine.step().get("flood", 0)
        count += 1
        assert count <= TURN_STEPS * (LONG // (STEP_TOKENS // SHORT_STEP) + 1)


def test_a_prompt_is_not_passed_over_for_an_urgent_one_that_finds_no_blocks() -> None:
    engine = Engine(num_blocks=52)
    engine.add("flood", LONG, 1)
    engine.step()
    engine.add("guest", 46 * 16, 0)
    steps = [engine.step() for _ in range(TURN_STEPS)]
    assert sum("flood" in step for step in steps) >= TURN_STEPS // 2
