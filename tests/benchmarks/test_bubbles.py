"""Laws of the bubble benchmark's figures, and one small run of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bubbles import report
from benchmarks.bubbles.measure import Bubble, Look, Plan, Run, Words, bubble, make_run, measure, while_queued
from benchmarks.result_files import read_result
from pengserve.planners.types.config import MicrobatchPolicy
from tests.benchmarks.answers import answer
from tests.support.models import tiny_model

PLAN = Plan(model=Path("model"))
WORDS = Words(template_tokens=12.0, tokens_per_word=2.0)


def look(time_s: float, busy_s: tuple[float, ...], idle_s: tuple[float, ...], waiting: int = 1) -> Look:
    """What is seen at this time."""
    return Look(time_s=time_s, waiting=waiting, busy_s=busy_s, idle_s=idle_s)


def run(way: MicrobatchPolicy, share: float, round_index: int = 0, **changes: int) -> Run:
    """A run with such a bubble share while prompts wait."""
    looks = [look(0.0, (0.0,), (0.0,)), look(1.0, (1.0 - share,), (share,)), look(2.0, (1.5,), (0.5,), waiting=0)]
    made = make_run(way, round_index, looks, [answer(1.0, 2.0)], 0.0, num_microbatches=9)
    return replace(made, **changes)


def pair(before: float, after: float, round_index: int = 0) -> list[Run]:
    """Both ways in one round."""
    return [
        run(MicrobatchPolicy.TOKENS, before, round_index),
        run(MicrobatchPolicy.LOOKAHEAD, after, round_index),
    ]


def test_both_ways_get_the_same_load_and_no_two_rounds_do() -> None:
    assert PLAN.requests(0, WORDS) == PLAN.requests(0, WORDS)
    assert not {r.prompt for r in PLAN.requests(0, WORDS)} & {r.prompt for r in PLAN.requests(1, WORDS)}


def test_lengths_of_prompts_are_spread_evenly_over_their_logarithm() -> None:
    plan = replace(PLAN, num_requests=4000)
    lengths = [2 * len(request.prompt.split()) for request in plan.requests(0, WORDS)]
    middle = (plan.least_tokens * plan.most_tokens) ** 0.5
    assert min(lengths) >= plan.least_tokens
    assert max(lengths) <= plan.most_tokens
    assert sum(length < middle for length in lengths) / len(lengths) == pytest.approx(0.5, abs=0.03)


def test_a_bubble_is_the_idle_share_of_all_stages_between_two_looks() -> None:
    found = bubble([look(5.0, (10.0, 10.0), (1.0, 1.0)), look(6.0, (11.0, 10.5), (1.0, 1.5))])
    assert found == Bubble(share=0.25, stages=(0.0, 0.5), seconds=1.0)


def test_what_comes_before_and_after_the_queue_does_not_count() -> None:
    waiting = [0, 0, 3, 0, 1, 0]
    looks = [look(float(i), (1.0,), (0.0,), waiting=num) for i, num in enumerate(waiting)]
    assert [seen.time_s for seen in while_queued(looks)] == [2.0, 3.0, 4.0]
    assert while_queued([replace(seen, waiting=0) for seen in looks]) == ()


def test_the_aim_is_half_the_bubbles_in_the_middle_round_and_no_failed_request() -> None:
    runs = [*pair(0.2, 0.1, 0), *pair(0.2, 0.19, 1), *pair(0.2, 0.02, 2)]
    assert report.ratios(runs) == pytest.approx([0.5, 0.95, 0.1])
    assert report.is_met(runs)
    assert not report.is_met([*pair(0.2, 0.1, 0), *pair(0.2, 0.19, 1), *pair(0.2, 0.11, 2)])
    assert not report.is_met([*runs[:-1], replace(runs[-1], failed=1)])


def test_a_failed_request_is_counted_and_its_error_is_shown() -> None:
    looks = [look(0.0, (0.0,), (0.0,)), look(1.0, (1.0,), (0.0,))]
    found = make_run("tokens", 0, looks, [answer(1.0, 2.0), answer(error="gone")], 0.0, num_microbatches=1)
    assert (found.failed, found.output_tokens) == (1, 2)
    assert "gone" in report.run_line(found)


def test_files_hold_every_run(tmp_path: Path) -> None:
    runs = pair(0.2, 0.05)
    json_path, text_path = report.write(tmp_path, PLAN, runs, "2026-01-01")
    assert [run["way"] for run in read_result(json_path)["runs"]] == ["tokens", "lookahead"]
    assert ": met, 0.25 times" in text_path.read_text()


@pytest.mark.validation
@pytest.mark.timeout(300)
def test_a_small_run_on_real_pipelines() -> None:
    plan = replace(
        PLAN,
        model=tiny_model(),
        rounds=3,  # how many requests are there when a microbatch is formed is a matter of time, and of chance
        num_requests=48,
        most_tokens=100,
        output_tokens=(6, 12),
        memory_bytes=32 << 20,
    )
    runs: list[Run] = []
    measure(plan, runs.append)
    tokens = [run for run in runs if run.way == "tokens"]
    lookahead = [run for run in runs if run.way == "lookahead"]
    assert len(tokens) == len(lookahead) == plan.rounds
    assert [run.failed for run in runs] == [0] * len(runs)
    assert [run.output_tokens for run in tokens] == [run.output_tokens for run in lookahead]
    most = sum(run.num_microbatches for run in tokens)
    assert sum(run.num_microbatches for run in lookahead) > most, "token counting puts all that is ready into one"
    for found in runs:
        assert all(0.0 < share < 1.0 for share in found.whole.stages)
        assert len(found.whole.stages) == 2
