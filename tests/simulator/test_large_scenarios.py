"""The large checked-in scenarios, made small."""

from pathlib import Path

import pytest

from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.run import simulate

FOLDER = Path(__file__).parents[2] / "simulator" / "scenarios"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["azure-8x", "thousand"])
def test_a_large_scenario_made_small_serves_all_its_requests(name: str) -> None:
    config = SimulationConfig.load(FOLDER / f"{name}.yaml")
    assert config.trace is not None
    cluster = config.cluster.model_copy(update={"instances": 4})
    trace = config.trace.model_copy(update={"max_requests": 60})
    small = config.model_copy(update={"cluster": cluster, "trace": trace, "scheduler": "fast"})
    result = simulate(small)
    assert len(result.outcomes) == 60
    assert all(outcome.end_s is not None for outcome in result.outcomes)
