"""The papers' scenarios do not get worse: parameters are dropped in time, as KunServe's bursts need it.

`bench-regret` does not see this. Its traces hardly ever fill the memory for so long that a drop decides.
"""

import pytest

from benchmarks.papers.measure import measure
from benchmarks.papers.scenarios import OURS, Run, configs, run
from pengserve.simulator.reports.figures import figures_of

pytestmark = pytest.mark.slow

FIRST_BURST = 4500  # requests of `kunserve-14b-burstgpt`: 106 s, and its memory is full at 84 s for the first time


def ours(scenario: str, max_requests: int | None = None) -> Run:
    """PengServe in a scenario, or in its first requests."""
    [(label, config)] = configs(scenario, (OURS,))
    assert config.trace is not None
    trace = config.trace.model_copy(update={"max_requests": max_requests})
    return run(scenario, label, config.model_copy(update={"trace": trace}))


def test_a_burst_that_fills_memory_drops_parameters_before_many_requests_are_preempted() -> None:
    found = ours("kunserve-14b-burstgpt", FIRST_BURST)
    drops, measured = figures_of(found.result).drops, measure(found)
    assert drops and drops[0][0] < 90.0
    assert measured["preemptions"] < 100  # 69; 150 where nothing is dropped
    assert measured["finished"] == FIRST_BURST
    assert measured["ttft_p99_s"] < 2.1  # 1.86 s; 2.66 s where nothing is dropped


def test_dropped_parameters_carry_an_extreme_burst_for_93_seconds() -> None:
    measured = measure(ours("kunserve-72b-extreme-burst"))
    # The burst begins at 60 s. Its KV fits for 93 s; for 42 s where parameters come back too soon.
    assert measured["full_at_s"] - 60.0 > 80.0
    assert measured["preemptions"] < 10  # 1; 66 where parameters come back too soon
    assert measured["finished"] == measured["requests"]
