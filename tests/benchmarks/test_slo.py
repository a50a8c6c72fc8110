"""What `benchmarks.slo` says of runs."""

from pathlib import Path
from typing import Any

from benchmarks.slo import report
from benchmarks.slo.measure import BURST, DECODES, PENGSERVE, PLAIN, STATIC, SYSTEMS, UNPLACED, Plan, Run

PLAN = Plan(model=Path("model"), rounds=1)


def run(system: str, *, ttft_s: float, kept: float, speed: float, answers: int = 1) -> Run:
    found: dict[str, Any] = {
        "ttft_mean_s": ttft_s, "tpot_kept": kept, "tbt_kept": kept, "sent_tbt_kept": kept, "tbt_p95_s": 0.01,
        "tokens_per_s": speed, "step_s": 0.003, "answers": answers, "preemptions": 0, "parked": 0, "staged_bytes": 0,
        "copy_wait_s": 0.0,
    }  # fmt: skip
    slos = {BURST: 0.01, DECODES: 0.005}
    return Run(system=system, round_index=0, tbt_s=slos, found={BURST: found, DECODES: found, "changes": 3})


RUNS = [
    run(PLAIN, ttft_s=3.0, kept=0.6, speed=1000),
    run(STATIC, ttft_s=1.0, kept=0.5, speed=600),
    run(UNPLACED, ttft_s=1.0, kept=0.98, speed=990),
    run(PENGSERVE, ttft_s=1.0, kept=0.99, speed=980),
]


def test_aims_compare_with_the_static_placement_and_with_plain_vllm() -> None:
    points, ttft, kept, speed, gained, gained_speed = (found for _, found, _ in report.aims(RUNS))
    assert (round(points), ttft, kept, speed) == (49, 3.0, 99.0, 0.98)
    assert (round(gained), round(gained_speed, 2)) == (1, 0.99)
    assert report.is_met(RUNS)
    assert not report.is_met([*RUNS[:3], run(PENGSERVE, ttft_s=1.0, kept=0.79, speed=980)])
    assert not report.is_met([*RUNS[:2], run(UNPLACED, ttft_s=1.0, kept=0.98, speed=1020), RUNS[3]])


def test_other_answers_fail_in_any_case() -> None:
    wrong = [*RUNS[:3], run(PENGSERVE, ttft_s=1.0, kept=0.99, speed=980, answers=2)]
    assert not report.is_met(wrong)
    assert "NOT EQUAL" in report.markdown(PLAN, wrong, "2026-01-01")


def test_the_result_has_a_row_for_each_system_in_each_scenario() -> None:
    text = report.markdown(PLAN, RUNS, "2026-01-01")
    for system in SYSTEMS:
        assert text.count(f"| {system} |") == 2
    assert "8 prompts of 384 with 192 more" in text
