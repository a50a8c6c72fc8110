"""Any request, through any sequence of merges, splits, drops, restores and migrations, gives the tokens it gives
undisturbed.

A Hypothesis state machine drives a real cluster: instances as processes, the real controller, a real ingress. After
each event every instance's memory ledger must hold its laws.
"""

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pengserve.cluster.ingress.config import OpenAIConfig
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.strategy import SwitchStrategy
from tests.support.disturbed import ENDS_WITHIN_S, Disturbed
from tests.support.elastic import elastic_cluster
from tests.support.guided import Answer, GuidedRequest, GuidedTraffic, guided_requests
from tests.support.traffic import TimedStream, Traffic

pytestmark = pytest.mark.slow

STRATEGIES = [strategy.value for strategy in SwitchStrategy]
LAYOUTS = {
    2: ["dp", "tp2", "pp2"],
    4: ["dp", "tp2", "tp2@(2,3)", "pp2@(0,1)", "pp2@(2,3)", "pp2@(0,1) tp2@(2,3)", "pp2", "tp4", "pp4"],
}
NESTED = [  # layouts between which one switch leads, with all that runs
    *(("pp2", "pp4"), ("pp2@(0,1)", "pp4"), ("pp2@(2,3)", "pp4")),
    *(("pp4", "pp2"), ("pp4", "pp2@(0,1)"), ("pp4", "pp2@(2,3)")),
    *(("tp2", "tp4"), ("tp2@(0,1)", "tp4"), ("tp2@(2,3)", "tp4")),
]
MEMORY_BYTES = 24 << 20  # of an instance: 3 MiB of weights, and KV that all requests fit into


class Machine(RuleBasedStateMachine):
    """Requests begin and layouts change, in any order, while earlier requests run."""

    disturbed: ClassVar[Disturbed]

    @initialize()
    def begin(self) -> None:
        self.running: list[tuple[int, Future[TimedStream]]] = []

    @rule(count=st.integers(1, 4), offset=st.integers(0, 20))
    def send(self, count: int, offset: int) -> None:
        for i in range(count):
            index = (offset + i) % len(self.disturbed.requests)
            self.running.append((index, self.disturbed.traffic.start(**self.disturbed.requests[index])))

    @rule(data=st.data(), strategy=st.sampled_from(STRATEGIES))
    def change(self, data: st.DataObject, strategy: str) -> None:
        layout = data.draw(st.sampled_from(LAYOUTS[self.disturbed.cluster.config.num_instances]))
        self.disturbed.cluster.set_layout(layout, strategy)

    @rule(data=st.data())
    def migrate(self, data: st.DataObject) -> None:
        ids = range(self.disturbed.cluster.config.num_instances)
        source, target = data.draw(st.sampled_from([(a, b) for a in ids for b in ids if a != b]))
        self.disturbed.migrate(source, target)

    @rule(delay_s=st.floats(0.0, 0.2))
    def let_it_run(self, delay_s: float) -> None:
        time.sleep(delay_s)

    @invariant()
    def memory_is_conserved(self) -> None:
        self.disturbed.check_memory()

    def teardown(self) -> None:
        # Paused requests go on once their instances are alone again.
        self.disturbed.cluster.set_layout("dp")
        self.disturbed.check_all(self.running)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.shapes)])
def disturbed(request: pytest.FixtureRequest, model: Any) -> Iterator[Disturbed]:
    degrees = (2,) if request.param == 2 else (2, 4)
    with (
        elastic_cluster(
            model,
            request.param,
            degrees=degrees,
            max_stages=request.param,
            max_in_flight=request.param,  # as on processors of their own
            memory_bytes=MEMORY_BYTES,
        ) as cluster,
        cluster.ingress(openai=OpenAIConfig(tool_call_parser="hermes", enable_auto_tool_choice=True)) as url,
        Traffic(url) as traffic,
    ):
        yield Disturbed(cluster, traffic, count=12, max_tokens=40)


@pytest.mark.parametrize(("kind", "strategy"), [*(("tp", s) for s in STRATEGIES), ("pp", "carry"), ("pp", "hard")])
def test_each_strategy_both_ways(disturbed: Disturbed, kind: str, strategy: str) -> None:
    disturbed.there_and_back(f"{kind}{disturbed.cluster.config.num_instances}", strategy)


class Guided:
    """Guided requests of every kind beside a cluster's others, and what they give when nothing happens."""

    def __init__(self, disturbed: Disturbed, requests: list[GuidedRequest]) -> None:
        self.requests, self._traffic = requests, GuidedTraffic(disturbed.traffic.url)
        disturbed.cluster.set_layout("dp")
        self._expected = self.start().result(ENDS_WITHIN_S)
        self.check(self._expected)

    def start(self) -> "Future[list[Answer]]":
        """Begins all of them at once."""
        return self._traffic.start(self.requests)

    def check(self, answers: list[Answer]) -> None:
        """Token by token the undisturbed answers, each of which is what its grammar allows."""
        for request, answer, expected in zip(self.requests, answers, self._expected, strict=True):
            request.check(answer, expected)


@pytest.fixture(scope="module")
def guided(disturbed: Disturbed, model: Any) -> Guided:
    return Guided(disturbed, guided_requests(model))


@pytest.mark.parametrize(("kind", "strategy"), [(kind, s) for kind in ("tp", "pp") for s in ("carry", "hard")])
def test_guided_requests_of_every_kind(disturbed: Disturbed, guided: Guided, kind: str, strategy: str) -> None:
    """Those that run at a switch are resumed from their tokens, or wait; those that come run several at once."""
    cluster = disturbed.cluster
    before = guided.start()
    time.sleep(0.2)
    cluster.set_layout(f"{kind}{cluster.config.num_instances}", strategy)
    within = guided.start()
    if strategy == "carry":
        guided.check(before.result(ENDS_WITHIN_S))
    guided.check(within.result(ENDS_WITHIN_S))
    last = guided.start()
    time.sleep(0.2)
    cluster.set_layout("dp", strategy)
    disturbed.check_memory()
    for answers in (before, last):
        guided.check(answers.result(ENDS_WITHIN_S))


@pytest.mark.parametrize(("before", "after"), NESTED)
def test_groups_grow_and_pipelines_are_cut_as_they_are(disturbed: Disturbed, before: str, after: str) -> None:
    cluster = disturbed.cluster
    if cluster.config.num_instances < 4:
        pytest.skip("of two instances there is one group")
    cluster.set_layout(before)
    running = [(i, disturbed.traffic.start(**request)) for i, request in enumerate(disturbed.requests)]
    time.sleep(0.3)
    num_ends = len(cluster.events(EventKind.TRANSITION_END))
    cluster.set_layout(after)
    disturbed.check_memory()
    [end] = cluster.events(EventKind.TRANSITION_END)[num_ends:]
    num_grammars = sum("structured_outputs" in request for request in disturbed.requests)
    assert end.data["num_carried"] > 0 and end.data["num_recomputed"] <= num_grammars, "what ran goes on with its KV"
    running += [(i, disturbed.traffic.start(**disturbed.requests[i])) for i in range(3)]
    time.sleep(0.15)
    if "@" not in after:
        cluster.require_layout(after)
    cluster.set_layout("dp")
    disturbed.check_memory()
    disturbed.check_all(running)


def test_any_sequence(disturbed: Disturbed) -> None:
    Machine.disturbed = disturbed
    examples = 8 if disturbed.cluster.config.num_instances == 2 else 4
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],  # a cluster cannot be put back, so a failure cannot be shrunk
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_boundaries(disturbed: Disturbed) -> None:
    """Carry back and forth as fast as it goes, under full load: every switch falls on another step boundary."""
    generator = random.Random(11)
    layouts = LAYOUTS[disturbed.cluster.config.num_instances]
    running = [(i, disturbed.traffic.start(**request)) for i, request in enumerate(disturbed.requests)]
    ids = range(disturbed.cluster.config.num_instances)
    for _ in range(6):
        disturbed.migrate(*generator.sample(ids, 2))
        time.sleep(generator.random() * 0.1)
        disturbed.cluster.set_layout(generator.choice(layouts), "carry")
        disturbed.migrate(*generator.sample(ids, 2))
        time.sleep(generator.random() * 0.05)
    disturbed.check_memory()
    disturbed.check_all(running)
