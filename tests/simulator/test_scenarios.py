"""Laws of the checked-in scenarios, each shortened: they load, every request ends, and a seed gives the same bytes."""

from pathlib import Path

import pytest

from benchmarks.papers.headlines import headlines
from benchmarks.papers.notes import ASSUMED, REASONS
from benchmarks.papers.scenarios import SCENARIOS, configs
from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.reports.figures import figures_of
from pengserve.simulator.reports.json_report import write_json
from pengserve.simulator.result import Result
from pengserve.simulator.run import simulate

FOLDER = Path(__file__).parents[2] / "simulator" / "scenarios"
LARGE = {"azure-8x", "thousand"}  # test_large_scenarios.py
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem not in LARGE)
PAPERS = [name for name in NAMES if name.startswith(("kunserve", "flying", "layerkv", "orbitflow", "fastswitch"))]
MOST_REQUESTS, MOST_LONG_REQUESTS = 150, 6  # the latter of thousands of tokens, each a step of its own


def shortened(config: SimulationConfig) -> SimulationConfig:
    """The first requests of its trace, with so little KV that a few of them fill it where parameters can be dropped."""
    cluster = config.cluster
    kv_tokens = 24_000 if cluster.max_stages > 1 else cluster.kv_tokens if cluster.host_bytes else None
    data = config.model_dump() | {"folder": config.folder, "cluster": cluster.model_dump() | {"kv_tokens": kv_tokens}}
    most = MOST_LONG_REQUESTS if config.name.startswith("orbitflow") else MOST_REQUESTS
    data["trace"] = data["trace"] | {"max_requests": most}
    return SimulationConfig.parse(data)


@pytest.fixture(scope="module", params=NAMES)
def result(request: pytest.FixtureRequest) -> Result:
    return simulate(shortened(SimulationConfig.load(FOLDER / f"{request.param}.yaml")))


def test_every_request_of_a_scenario_ends_well(result: Result) -> None:
    assert MOST_LONG_REQUESTS <= len(result.outcomes) <= MOST_REQUESTS
    assert not [outcome.request_id for outcome in result.outcomes if outcome.end_s is None or outcome.refused]


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_is_named_as_its_file(name: str) -> None:
    assert SimulationConfig.load(FOLDER / f"{name}.yaml").name == name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kunserve-14b-longbench", "flying-70b-priority"])
def test_the_same_seed_gives_the_same_bytes(name: str) -> None:
    config = shortened(SimulationConfig.load(FOLDER / f"{name}.yaml"))
    first, second = (write_json(run, figures_of(run)) for run in (simulate(config), simulate(config)))
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "label", "config"),
    [(name, label, config) for name in SCENARIOS for label, config in configs(name) if label != "PengServe"],
    ids=str,
)
def test_every_policy_that_is_compared_serves_its_scenario(name: str, label: str, config: SimulationConfig) -> None:
    found = simulate(shortened(config))
    assert all(outcome.end_s is not None for outcome in found.outcomes)
    assert found.policy == config.policy.name


def test_every_scenario_of_a_paper_is_compared_and_explained() -> None:
    assert set(PAPERS) == set(SCENARIOS) == set(ASSUMED) == set(REASONS)


def test_every_headline_names_runs_that_are_made() -> None:
    labels = {name: [label for label, _ in configs(name)] for name in SCENARIOS}
    for headline in headlines():
        assert headline.baseline in labels[headline.scenario]
        assert headline.subject in labels[headline.scenario]
