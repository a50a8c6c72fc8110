"""Laws of the facade: the whole catalog is exported from the start, names match, both backends agree."""

import subprocess
import sys

import pytest
from prometheus_client import REGISTRY, Gauge
from prometheus_client.parser import text_string_to_metric_families

from pengserve.cluster.metrics import catalog
from pengserve.cluster.metrics.catalog import CATALOG, MetricKind, MetricSpec
from pengserve.cluster.metrics.facade import Metrics, resolve_backend
from pengserve.planners.types.errors import ConfigError


def families(metrics: Metrics) -> dict[str, object]:
    """Scraped families by the catalog's names."""
    body, content_type = metrics.exposition()
    assert content_type.startswith("text/plain")
    parsed = text_string_to_metric_families(body.decode())
    return {f.name + ("_total" if f.type == "counter" else ""): f for f in parsed}


def test_a_fresh_scrape_has_exactly_the_catalog(metrics: Metrics) -> None:
    scraped = {name: f for name, f in families(metrics).items() if name.startswith("pengserve_")}
    assert scraped.keys() == CATALOG.keys()
    for name, family in scraped.items():
        assert family.type == CATALOG[name].kind.value
        assert family.documentation == CATALOG[name].help


def test_recorded_values_come_out_with_their_labels(metrics: Metrics) -> None:
    metrics.counter(catalog.DISPATCHED, instance_id="1").inc(3)
    metrics.gauge(catalog.ROUTES).set(2)
    metrics.histogram(catalog.RESUME_SECONDS).observe(0.02)
    body = metrics.exposition()[0].decode()
    assert 'pengserve_dispatch_total{app="shop",instance_id="1"} 3.0' in body
    assert 'pengserve_routes{app="shop"} 2.0' in body
    assert 'pengserve_resume_seconds_bucket{app="shop",le="0.025"} 1.0' in body


def test_a_metric_is_bound_once(metrics: Metrics) -> None:
    assert metrics.counter(catalog.DISPATCHED, instance_id="1") is metrics.counter(catalog.DISPATCHED, instance_id="1")
    assert metrics.counter(catalog.DISPATCHED, instance_id="1") is not metrics.counter(
        catalog.DISPATCHED, instance_id="2"
    )


def test_two_facades_in_one_process_do_not_mix(metrics: Metrics) -> None:
    other = Metrics("prometheus", app="other")
    other.gauge(catalog.ROUTES).set(7)
    assert 'app="other"' not in metrics.exposition()[0].decode()


def test_the_default_registry_is_included(metrics: Metrics) -> None:
    gauge = Gauge("vllm:made_by_a_test", "as vLLM registers its own", registry=REGISTRY)
    try:
        assert "vllm:made_by_a_test" in families(metrics)
    finally:
        REGISTRY.unregister(gauge)


def test_refreshers_run_before_a_scrape_and_a_broken_one_hides_nothing(metrics: Metrics) -> None:
    metrics.on_refresh(lambda: 1 / 0)
    metrics.on_refresh(lambda: metrics.gauge(catalog.ROUTES).set(5))
    assert 'pengserve_routes{app="shop"} 5.0' in metrics.exposition()[0].decode()


@pytest.mark.parametrize(
    ("name", "kind", "buckets"),
    [
        ("requests_total", MetricKind.COUNTER, ()),
        ("pengserve:requests_total", MetricKind.COUNTER, ()),
        ("pengserve_requests", MetricKind.COUNTER, ()),
        ("pengserve_requests_total", MetricKind.GAUGE, ()),
        ("pengserve_wait_seconds", MetricKind.HISTOGRAM, ()),
        ("pengserve_wait_seconds", MetricKind.HISTOGRAM, (2.0, 1.0)),
    ],
)
def test_a_spec_against_the_conventions_is_refused(name: str, kind: MetricKind, buckets: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=name):
        MetricSpec(name=name, kind=kind, area=catalog.MetricArea.TRAFFIC, unit="x", help="x", buckets=buckets)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.backend.*statsd"):
        Metrics("statsd")


def test_outside_ray_auto_is_prometheus() -> None:
    assert resolve_backend("auto", num_ingresses=4) == "prometheus"


def test_declaring_and_resolving_imports_nothing_heavy() -> None:
    code = (
        "import sys; from pengserve.cluster.metrics import catalog, facade; facade.resolve_backend('auto'); "
        "print([m for m in ('prometheus_client', 'ray', 'vllm', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
