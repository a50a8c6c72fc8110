"""Cohorts of what runs in a cluster, from the few ages that each instance tells."""

import numpy as np

from pengserve.planners.judge.cohorts import COHORTS, ages_of


def test_a_cohort_is_as_many_requests_of_all_instances() -> None:
    ages = np.array([[10 * place, 1000] for place in range(COHORTS)])
    assert ages_of(np.array([6, 0]), ages) == (0, 10, 20, 30, 40, 50)
    assert ages_of(np.array([6, 6]), ages) == (0, 20, 40, 1000, 1000, 1000), "half of them run at each"
    assert ages_of(np.array([60, 6]), ages) == (0, 10, 20, 30, 40, 1000)


def test_alike_requests_have_one_age() -> None:
    assert ages_of(np.array([3, 4]), np.full((COHORTS, 2), 7)) == (7,) * COHORTS
