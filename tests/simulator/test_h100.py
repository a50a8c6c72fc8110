"""Step times against measured TPOT of vLLM on H100 (aiconfigurator, Apache-2.0): dense models, TTFT below 5 s.

The host's part of a step was fitted to every second of these points; errors are reported on the others. Tuned on none:
the tables, the composition of mixed steps, the budget of a step (vLLM's default for servers on GPUs of 70 GB or more).
"""

from pathlib import Path

import pytest

from benchmarks.step_tables.host import DYNAMO, errors_of, fit_host, read_points
from pengserve.simulator.timing.choose import host

POINTS = Path(__file__).parents[2].parent / "shared" / "profiles" / "h100_vllm_end_to_end.csv"
AIM = 0.10  # of each model and degree
AIM_OF_ALL = 0.06

pytestmark = pytest.mark.skipif(not POINTS.exists(), reason="the measured points are not here")


@pytest.mark.slow
def test_tpot_of_points_that_nothing_was_fitted_on_is_within_ten_percent_in_the_mean(record_property, capsys):
    found = errors_of(read_points(POINTS)[1::2], host())
    with capsys.disabled():
        print("", *found, sep="\n")
    for errors in found:
        record_property(errors.name, errors.mean)
        assert errors.mean <= AIM, errors
    assert found[-1].mean <= AIM_OF_ALL


@pytest.mark.validation
def test_all_dense_points_together_are_within_ten_percent_even_those_that_no_single_engine_explains():
    everything = [*read_points(POINTS), *read_points(POINTS, DYNAMO)]
    assert len(everything) == 132
    assert errors_of(everything, host())[-1].mean <= AIM


@pytest.mark.validation
def test_the_host_s_part_is_what_the_other_half_gives():
    found = fit_host(read_points(POINTS)[0::2])
    assert host().step_s == pytest.approx(found.step_s, rel=0.02)
    assert host().sequence_s == pytest.approx(found.sequence_s, rel=0.02)
