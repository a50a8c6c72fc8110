"""A run of all features, scraped by a real Prometheus: each metric says something, and each panel has data."""

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pengserve.cluster.ingress import api
from pengserve.cluster.metrics.catalog import CATALOG, MetricKind
from pengserve.dashboards.alerts import ALERTS
from pengserve.dashboards.build import dashboard
from pengserve.planners.types.config import JudgeConfig
from pengserve.planners.types.events import EventKind
from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.ingress import MODEL_NAME
from tests.support.prometheus import INSTALLED, PrometheusServer
from tests.support.streams import make_prompts
from tests.support.traffic import Traffic
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.shapes,
    pytest.mark.skipif(not INSTALLED, reason="no Prometheus is installed (apt-get install prometheus)"),
]

MEMORY_BYTES = 7 << 20
BLOCK_BYTES = 4 * 16384  # of the tiny model, over its four layers
CHUNK_BYTES = 64 << 10
WITHIN_S = 240.0
PROMPTS = [prompt + [7] * 100 for prompt in make_prompts(12, seed=11, longest=60)]
VARIABLES = {"$__rate_interval": "1m", "$app": ".*", "$instance": ".*", "$model": ".*"}


@pytest.fixture(scope="module")
def prometheus(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """A server that has seen the whole run."""
    server = PrometheusServer(tmp_path_factory.mktemp("prometheus"))
    patch = pytest.MonkeyPatch()
    patch.setattr(api, "SNAPSHOT_PERIOD_S", 0.3)
    try:
        run_shapes(model, server)
        run_tiers(model, server)
        yield server
    finally:
        patch.undo()
        server.close()


def run_shapes(model: Path, server: PrometheusServer) -> None:
    """Merges, splits, a drop, its restore, a death and decisions, all under load."""
    judge = JudgeConfig(horizon_s=1.0)
    with (
        elastic_cluster(model, 2, degrees=(2,), max_stages=2, memory_bytes=MEMORY_BYTES, judge=judge) as cluster,
        cluster.ingress() as url,
        Traffic(url) as traffic,
    ):
        server.scrape(url)
        server.wait_scraped(url)

        def load(count: int, max_tokens: int, **params: Any) -> list[Any]:
            return [traffic.start(prompt=PROMPTS[n % 12], max_tokens=max_tokens, **params) for n in range(count)]

        def ended(streams: list[Any]) -> None:
            for stream in streams:
                assert not stream.result(WITHIN_S).error

        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 4}
            assert http.post("/v1/completions", json=body | {"n": 99}).status_code == 400
            slo = body | {"max_tokens": 20, "slo": {"ttft_ms": 5000, "tbt_ms": 1000}}
            for _ in range(3):  # a rate is of what rises, not of what begins
                assert http.post("/v1/completions", json=slo).status_code == 200
                time.sleep(1.0)
        ended(load(40, 120))  # more than memory holds: requests are preempted
        for shape, strategy in (("tp2", "carry"), ("dp", "carry"), ("tp2", "hard"), ("dp", "carry")):
            running = load(16, 250)
            time.sleep(0.3)
            cluster.set_layout(shape, strategy)
            time.sleep(1.0)
            if strategy == "hard":
                cluster.set_layout("dp")  # what pauses goes on then
            ended(running)
        alone = sizes(server)
        running = load(12, 200)
        cluster.set_layout("pp2")
        ended(running)
        require_conserved(server, alone)
        cluster.set_layout("dp")
        running = load(8, 300)
        time.sleep(0.3)
        os.kill(cluster.pid(1), signal.SIGKILL)
        ended(running)
        cluster.wait_formable()
        drain(url, load, ended)
        cluster.wait_formable()
        decide(cluster, load, ended)
        server.wait_scraped(url)
        time.sleep(1.0)


def drain(url: str, load: Any, ended: Any) -> None:
    """An instance leaves at once while the other one is full: what finds no room there goes on from its tokens."""
    running = load(40, 300)
    time.sleep(1.0)
    with httpx.Client(base_url=f"{url}/cluster/instances/1", timeout=60, trust_env=False) as http:
        assert http.post("/drain", json={"timeout_s": 0}).status_code == 200
        ended(running)
        until(lambda: bool(http.get("/drain").json()["safe_to_delete"]), timeout_s=WITHIN_S)
        assert http.post("/undrain", json={}).status_code == 200


def decide(cluster: ElasticCluster, load: Any, ended: Any) -> None:
    """Lets the judge decide under bursts, until it has said what became of a decision."""
    cluster.now(cluster.controller.auto_layout)
    deadline_s = time.monotonic() + WITHIN_S
    while not cluster.events(EventKind.PLAN_OUTCOME):
        assert time.monotonic() < deadline_s, cluster.events(EventKind.PLAN_DECIDED)[-3:]
        ended(load(24, 60))
        time.sleep(0.5)


def run_tiers(model: Path, server: PrometheusServer) -> None:
    """Requests that do not fit the device, prefixes that come back from the host, and urgent requests."""
    engine = {"kv_cache_memory_bytes": 20 * BLOCK_BYTES, "max_num_seqs": 6, "scheduling_policy": "priority"}
    cluster = ElasticCluster(model, 1, degrees=(), engine=engine)
    cluster.instance_config = replace(cluster.instance_config, host_bytes=300 * BLOCK_BYTES, link_bytes_per_s=2e7)
    try:
        cluster.start()
        with cluster.ingress() as url, Traffic(url) as traffic:
            server.scrape(url)
            server.wait_scraped(url)
            for _ in range(2):
                running = [traffic.start(prompt=prompt * 2, max_tokens=60) for prompt in PROMPTS]
                for stream in running:
                    assert not stream.result(WITHIN_S).error
            displaced(server, traffic)
            time.sleep(1.0)
    finally:
        cluster.stop()


def displaced(server: PrometheusServer, traffic: Traffic) -> None:
    """Urgent requests take the places of others, until that was scraped."""
    deadline_s = time.monotonic() + WITHIN_S
    while not any(value > 0 for value in server.over_run("max(pengserve_instance_displaced_total)")):
        assert time.monotonic() < deadline_s, "no request gave its place away"
        running = [traffic.start(prompt=[n, 8, 9], max_tokens=55) for n in range(12)]
        time.sleep(0.1)
        running += [traffic.start(prompt=[n, 6, 7], max_tokens=20, priority=-1) for n in range(4)]
        for stream in running:
            assert not stream.result(WITHIN_S).error


def sizes(server: PrometheusServer) -> dict[str, tuple[float, float]]:
    """Weight and KV bytes of each instance, as Prometheus has them."""
    found = {}
    for slot in ("0", "1"):
        weights, kv = (
            float(server.query(f'pengserve_instance_{name}_bytes{{instance_id="{slot}"}}')[0]["value"][1])
            for name in ("weight", "kv")
        )
        found[slot] = (weights, kv)
    return found


def require_conserved(server: PrometheusServer, alone: dict[str, tuple[float, float]]) -> None:
    """In a pipeline what the weights gave up is room for KV: within a chunk of the arena for each layer."""
    deadline_s = time.monotonic() + 30
    while (dropped := sizes(server)) == alone:
        assert time.monotonic() < deadline_s, "the drop was never scraped"
        time.sleep(0.2)
    for slot, (weights, kv) in alone.items():
        fewer_weights, more_kv = dropped[slot]
        assert fewer_weights == pytest.approx(weights / 2, rel=0.05)
        assert abs((fewer_weights + more_kv) - (weights + kv)) <= 5 * CHUNK_BYTES


def test_no_declared_metric_is_never_set(prometheus: PrometheusServer) -> None:
    silent = []
    for name, spec in CATALOG.items():
        series = f"{name}_count" if spec.kind is MetricKind.HISTOGRAM else name
        if not any(value > 0 for value in prometheus.over_run(f"max({series})")):
            silent.append(name)
    assert silent == []


@pytest.mark.parametrize("reason", ["lost", "drained"])
def test_requests_that_go_on_from_their_tokens_are_counted_by_reason(prometheus: PrometheusServer, reason: str) -> None:
    series = f'max(pengserve_requests_resumed_total{{reason="{reason}"}})'
    assert any(value > 0 for value in prometheus.over_run(series))


def test_every_expression_of_the_dashboard_returns_data(prometheus: PrometheusServer) -> None:
    empty = []
    for panel in dashboard("prometheus")["panels"]:
        for target in panel.get("targets", ()):
            promql = target["expr"]
            for name, value in VARIABLES.items():
                promql = promql.replace(name, value)
            if not prometheus.over_run(promql):
                empty.append(f"{panel['title']}: {promql}")
    assert empty == []


def test_every_alert_asks_for_series_that_exist(prometheus: PrometheusServer) -> None:
    for alert in ALERTS:
        for name in re.findall(r"\b(?:pengserve_|vllm:)\w+", alert.promql):
            assert prometheus.over_run(name), f"{alert.name}: {name}"
        prometheus.query(alert.promql)


def test_labels_are_bounded(prometheus: PrometheusServer) -> None:
    """Slots of instances, words of the code, and tenants up to a bound: no other label takes what a client sends."""
    words = {"action", "bound", "direction", "figure", "kind", "latency", "outcome", "phase", "reason", "service_class"}
    words |= {"instance_id", "shape", "state", "strategy", "tenant", "version"}
    for name, spec in CATALOG.items():
        assert set(spec.labels) <= words, name
        series = f"{name}_count" if spec.kind is MetricKind.HISTOGRAM else name
        assert max(prometheus.over_run(f"count({series})"), default=0) <= 24, name
