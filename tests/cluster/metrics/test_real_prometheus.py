"""A real Prometheus server scrapes the facade and evaluates every expression of the dashboard."""

import http
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pengserve.cluster.metrics.catalog import CATALOG, MetricKind
from pengserve.cluster.metrics.facade import Metrics
from pengserve.dashboards import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

FIXED = re.compile(r'(\w+)="([^"$]+)"')
_CONFIG = """
global: {{scrape_interval: 300ms, scrape_timeout: 300ms}}
scrape_configs: [{{job_name: pengserve, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
"""


def asked_labels(name: str) -> list[dict[str, str]]:
    """The fixed labels by which panels ask for a metric, each combination once; one without any where none does."""
    panels = build.dashboard("prometheus")["panels"]
    text = " ".join(target["expr"] for panel in panels for target in panel.get("targets", ()))
    found = [dict(FIXED.findall(matchers)) for matchers in re.findall(rf"\b{name}{{([^}}]*)}}", text)]
    return [dict(labels) for labels in sorted({tuple(labels.items()) for labels in found if labels})] or [{}]


def fill(metrics: Metrics) -> None:
    """Gives every metric one value, for each combination of labels that panels ask for."""
    for name, spec in CATALOG.items():
        for asked in asked_labels(name):
            labels = dict.fromkeys(spec.labels, "0") | asked
            if spec.kind is MetricKind.COUNTER:
                metrics.counter(spec, **labels).inc()
            elif spec.kind is MetricKind.GAUGE:
                metrics.gauge(spec, **labels).set(1)
            else:
                metrics.histogram(spec, **labels).observe(0.01)


@pytest.fixture
def target(metrics: Metrics) -> Iterator[int]:
    """Port of an HTTP server that answers with the facade's exposition."""
    fill(metrics)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, content_type = metrics.exposition()
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture
def prometheus(target: int, tmp_path: Path) -> Iterator[str]:
    """Base URL of a Prometheus server that scrapes the target."""
    config = tmp_path / "prometheus.yml"
    config.write_text(_CONFIG.format(port=target))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    arguments = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    process = subprocess.Popen([*arguments, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=20)


def query(base: str, promql: str) -> list[Any]:
    """Result of an instant query; an expression that Prometheus refuses fails the test."""
    url = f"{base}/api/v1/query?query={urllib.parse.quote(promql)}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            result: list[Any] = json.load(answer)["data"]["result"]
            return result
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.SERVICE_UNAVAILABLE:  # it listens, and is not ready yet
            raise
        pytest.fail(f"{promql}: {error.read().decode()}")


def wait_for_scrapes(base: str, num: int, timeout_s: float = 30.0) -> None:
    """Returns once the target was scraped `num` times."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        try:
            if query(base, f"count_over_time(up[1m]) >= {num} and up == 1"):
                return
        except OSError:
            pass  # not listening, or not ready yet
        time.sleep(0.1)
    pytest.fail(f"no {num} scrapes within {timeout_s} s")


def test_every_metric_arrives_and_every_panel_has_data(prometheus: str) -> None:
    wait_for_scrapes(prometheus, 3)
    for name, spec in CATALOG.items():
        series = f"{name}_count" if spec.kind is MetricKind.HISTOGRAM else name
        assert len(query(prometheus, f'{series}{{app="shop"}}')) == len(asked_labels(name)), series
    variables = {"$__rate_interval": "1m", "$app": ".*", "$instance": ".*", "$model": ".*"}
    for panel in build.dashboard("prometheus")["panels"]:
        for target in panel.get("targets", ()):
            promql = target["expr"]
            for name, value in variables.items():
                promql = promql.replace(name, value)
            found = query(prometheus, promql)
            of_vllm = "vllm:" in promql  # no engine runs here: such a query must be valid, and finds nothing
            divides_zero_rates = "> 0)" in promql and "rate(" in promql
            assert found or of_vllm or divides_zero_rates, f"{panel['title']}: {promql}"
