"""Metrics of tenants: what is in flight and was computed, with no more series than the bound."""

import pytest

pytest.importorskip("vllm")

from pengserve.cluster.ingress.request.kept import KeptSequence
from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.cluster.ingress.request.request_options import RequestOptions
from pengserve.cluster.ingress.tenants.tenant_meters import MAX_LABELS, TenantMeters
from pengserve.cluster.metrics.facade import Metrics
from pengserve.planners.types.contract import Contract, Slo
from tests.support.moving import a_request


def record(number: int, tenant: str) -> RequestRecord:
    found = RequestRecord(a_request(number, 4), RequestOptions(contract=Contract(tenant=tenant)))
    found.output_token_ids += [7] * 7
    found.first_token_s, found.num_parks, found.num_recomputes, found.swapped_bytes = 1.0, 2, 1, 4096
    found.kept = KeptSequence(Slo(ttft_s=5.0), 0.0, is_paced=False)
    found.kept.add(1, 9.0 if number % 2 else 1.0)
    found.kept.finish = "stop"
    return found


def total(lines: list[str], name: str, label: str = "") -> float:
    """Of all tenants; their series are bounded."""
    found = [line for line in lines if line.startswith(name + "{") and label in line]
    assert len(found) <= MAX_LABELS + 1 or not label
    return sum(float(line.split()[-1]) for line in found)


def test_a_thousand_tenants_have_bounded_series_and_no_token_is_lost() -> None:
    metrics, flight = Metrics("prometheus", app="tenant-meters"), [record(0, "t0"), record(1, "")]
    flight[1].first_token_s = None
    meters = TenantMeters(metrics, lambda: flight)
    for number in range(1000):
        meters.ended(record(number, f"t{number}"))
    metrics.refresh()
    lines = [line for line in metrics.exposition()[0].decode().splitlines() if 'app="tenant-meters"' in line]
    tokens = [line for line in lines if line.startswith("pengserve_tenant_tokens_total{")]
    assert len(tokens) == MAX_LABELS + 1
    assert sum(float(line.split()[-1]) for line in tokens) == 1000 * 10
    assert total(lines, "pengserve_tenant_preemptions_total", 'kind="parked"') == 2000
    assert total(lines, "pengserve_tenant_preemptions_total", 'kind="recomputed"') == 1000
    assert total(lines, "pengserve_tenant_swapped_bytes_total") == 1000 * 4096
    assert total(lines, "pengserve_tenant_slo_requests_total", 'outcome="kept"') == 500
    assert total(lines, "pengserve_tenant_slo_requests_total", 'outcome="missed"') == 500
    flights = {line.split("{")[1] for line in lines if line.startswith("pengserve_tenant_requests{")}
    assert any('tenant="t0"' in line and 'state="running"' in line and line.endswith("1.0") for line in flights)
    assert any('tenant="*"' in line and 'state="waiting"' in line and line.endswith("1.0") for line in flights)
    flight.clear()
    metrics.refresh()
    text = metrics.exposition()[0].decode()
    assert not [
        line for line in text.splitlines() if line.startswith("pengserve_tenant_requests{") and line.endswith(" 1.0")
    ]
