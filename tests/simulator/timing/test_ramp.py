"""Sums of steps in closed form are what adding them up gives."""

from hypothesis import given
from hypothesis import strategies as st

from pengserve.simulator.timing.ramp import StepRamp

SECONDS = st.floats(1e-5, 1.0)
RAMPS = st.builds(StepRamp, SECONDS, st.one_of(st.just(0.0), st.floats(1e-9, 1e-2)), st.one_of(st.just(0.0), SECONDS))


@given(ramp=RAMPS, num_steps=st.integers(0, 300))
def test_the_sum_is_what_the_steps_add_up_to(ramp, num_steps):
    steps = [max(ramp.floor_s, ramp.first_s + index * ramp.slope_s) for index in range(num_steps)]
    assert abs(ramp.sum_s(num_steps) - sum(steps)) <= 1e-9 * max(1.0, sum(steps))


@given(ramp=RAMPS, num_steps=st.integers(0, 10**7))
def test_steps_within_is_the_inverse_of_the_sum(ramp, num_steps):
    assert ramp.steps_within(ramp.sum_s(num_steps)) == num_steps


@given(ramp=RAMPS, seconds=st.floats(0.0, 1e5))
def test_one_step_more_would_not_fit(ramp, seconds):
    num_steps = ramp.steps_within(seconds)
    assert ramp.sum_s(num_steps) <= seconds < ramp.sum_s(num_steps + 1)
