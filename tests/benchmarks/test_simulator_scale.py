"""Laws of what the benchmark of large simulations measures."""

import pytest

from benchmarks.simulator_scale import FOLDER, timed_ticks
from pengserve.controller import loop
from pengserve.controller.loop import Controller
from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.engine.port import SimPort
from pengserve.simulator.run import simulate


@pytest.mark.slow
def test_every_tick_is_timed_and_the_controller_is_left_as_it_was() -> None:
    before = Controller.tick, SimPort.statuses
    config = SimulationConfig.load(FOLDER / "small.yaml")
    with timed_ticks() as ticks_s:
        result = simulate(config)
    assert (Controller.tick, SimPort.statuses) == before
    assert len(ticks_s) >= int(result.end_s / (loop._MIN_PERIOD_S + config.controller.tick_s))
    assert all(0 < tick_s < 1 for tick_s in ticks_s)
    assert simulate(config) == result  # timing changes nothing
