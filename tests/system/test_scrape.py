"""What an operator scrapes is what `docs/metrics.md` says."""

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pengserve.cluster.metrics.document import documented_names
from pengserve.cluster.metrics.vllm_metrics import read_vllm_metrics
from tests.support.application import Application

pytestmark = pytest.mark.slow

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def scrape(application: Application) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Scraped names (as documented) and their samples by labels."""
    answer = httpx.get(f"{application.url}/metrics", timeout=10)
    assert answer.status_code == 200
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(answer.text):
        name = family.name + ("_total" if family.type == "counter" else "")
        samples = {tuple(sorted(s.labels.items())): s.value for s in family.samples if not s.name.endswith("_created")}
        found.setdefault(name, {}).update(samples)
    return found


def total(scraped: dict[str, dict[tuple[tuple[str, str], ...], float]], name: str) -> float:
    """Sum of a metric's samples."""
    return sum(scraped[name].values())


def test_a_live_scrape_has_what_is_documented_and_nothing_else(application: Application) -> None:
    scraped = scrape(application).keys()
    documented = documented_names(DOCUMENT.read_text())
    conditional = {metric.name for metric in read_vllm_metrics() or () if metric.condition}
    assert documented - scraped - conditional == set()
    ours = {name for name in scraped if name.startswith("pengserve_") and not name.endswith("_created")}
    assert ours - documented == set()


def test_counters_follow_the_requests(application: Application) -> None:
    before = scrape(application)
    body = {"model": application.model_name, "prompt": "hello", "max_tokens": 5, "ignore_eos": True}
    for _ in range(3):
        assert httpx.post(f"{application.url}/v1/completions", json=body, timeout=60).status_code == 200
    after = scrape(application)
    assert total(after, "pengserve_requests_total") - total(before, "pengserve_requests_total") == 3
    assert total(after, "pengserve_dispatch_total") - total(before, "pengserve_dispatch_total") == 3
    for name in ("pengserve_instance_generated_tokens_total", "vllm:generation_tokens_total"):
        assert total(after, name) - total(before, name) == 15, name
    assert total(after, "pengserve_requests_running") == 0
    assert total(after, "pengserve_links_up") == 2
    assert total(after, "pengserve_instance_up") == 2
    assert total(after, "pengserve_controller_up") == 1
    assert total(after, "pengserve_instance_kv_blocks") > 0
