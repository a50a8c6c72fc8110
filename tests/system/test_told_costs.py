"""What real instances found their steps to cost comes to the real controller, and to its judge."""

import time
from pathlib import Path

import pytest

from pengserve.planners.columns import ready_instances
from pengserve.planners.types.snapshot import ClusterSnapshot
from tests.support.elastic import elastic_cluster

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

TOLD_WITHIN_S = 120.0  # after 15 s without a request, steps of `dp` are timed


def test_an_idle_instance_times_its_steps_and_the_judge_has_the_prices(model: Path) -> None:
    with elastic_cluster(model, 2, degrees=(), max_stages=2, memory_bytes=64 << 20) as cluster:
        deadline_s = time.monotonic() + TOLD_WITHIN_S
        while not all(told(snapshot := cluster.snapshot())):
            assert time.monotonic() < deadline_s, [lane for i in snapshot.instances for lane in i.lanes]
            time.sleep(0.5)
        watched = cluster.controller._steering._history.judge.watched
        costs = watched.costs(ready_instances(snapshot.instances))
        alone, pair = costs.of("dp"), costs.of("pp2")
        assert alone is not None and pair is not None
        assert 0 < alone.step_s(8, 8, 400) < pair.step_s(8, 8, 400), "each stage has what is no work of layers"


def told(snapshot: ClusterSnapshot) -> list[bool]:
    """Whether each instance tells what its steps cost, in dp and in the pipeline."""
    return [
        {lane.shape for lane in instance.lanes if lane.step_cost is not None} >= {"dp", "pp2"}
        for instance in snapshot.instances
    ]
