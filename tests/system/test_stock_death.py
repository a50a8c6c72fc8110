"""Law: an instance with vLLM's own scheduling, a step ahead, may die at any time: every stream goes on to its end."""

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceState
from tests.support import ahead_host
from tests.support.disturbed import Disturbed
from tests.support.elastic import ElasticCluster, started
from tests.support.traffic import Traffic

pytestmark = [pytest.mark.slow, pytest.mark.shapes]


def test_a_death_with_a_step_under_way_costs_no_stream(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ahead_host.VARIABLE, str(tmp_path))
    cluster = ElasticCluster(model, 2, degrees=(), host_module="tests.support.ahead_host")
    with started(cluster), cluster.ingress() as url, Traffic(url) as traffic:
        disturbed = Disturbed(cluster, traffic, count=8, max_tokens=150)
        for victim in (0, 1):
            running = [(i, traffic.start(**request)) for i, request in enumerate(disturbed.requests)]

            def is_busy(snapshot: ClusterSnapshot, victim: int = victim) -> bool:
                return snapshot.instances[victim].stats.num_running > 1

            cluster.wait(is_busy)
            os.kill(cluster.pid(victim), signal.SIGKILL)
            disturbed.check_all(running)
            cluster.wait(lambda s: all(instance.state is InstanceState.READY for instance in s.instances))
        assert cluster.snapshot().instances[0].stats.total_resumed > 0
