"""Figures of tenants: what is in flight and was served, shares that sum to one, memory and answers that are bounded."""

import pytest

pytest.importorskip("vllm")

from pengserve.cluster.ingress.request.kept import KeptSequence
from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.cluster.ingress.request.request_options import RequestOptions
from pengserve.cluster.ingress.tenants.tenant_figures import MAX_KEPT, MAX_SHOWN, WINDOW_S, TenantFigures
from pengserve.planners.types.contract import Contract, Slo
from tests.support.moving import a_request


def record(number: int, tenant: str, tokens: int = 4, *, cached: int = 0, begun: bool = True) -> RequestRecord:
    found = RequestRecord(a_request(number, 4), RequestOptions(contract=Contract(tenant=tenant)))
    found.output_token_ids += [7] * tokens
    found.first_token_s, found.num_cached_tokens = (1.0 if begun else None), cached
    return found


def test_what_is_in_flight_and_what_was_served() -> None:
    figures = TenantFigures(lambda: 0.0)
    figures.ended(record(0, "a", 27))
    figures.ended(record(1, "b", 7, cached=3))
    figures.ended(record(2, "b", 0, begun=False))
    flight = [record(3, "a"), record(4, "a", 0, begun=False), record(5, "", 0, begun=False)]
    first, second, third = figures.uses(flight)
    assert (first.tenant, first.num_running, first.num_waiting, first.total_tokens) == ("a", 1, 1, 30)
    assert (second.tenant, second.total_tokens, second.total_ended) == ("b", 7, 2)
    assert (third.tenant, third.num_waiting, third.share) == ("", 1, 0.0)
    assert first.share == pytest.approx(30 / 37) and first.attainment is None


def test_preemptions_swapped_bytes_and_attainment_are_added_up() -> None:
    figures = TenantFigures(lambda: 0.0)
    for number, finish in enumerate(["length", "error", "abort"]):
        found = record(number, "a")
        found.num_parks, found.num_recomputes, found.swapped_bytes = 2, 1, 4096
        found.kept = KeptSequence(Slo(ttft_s=5.0), 0.0, is_paced=False)
        found.kept.add(1, 1.0)
        found.kept.finish = finish
        figures.ended(found)
    (use,) = figures.uses([])
    assert (use.total_parked, use.total_recomputed, use.swapped_bytes) == (6, 3, 3 * 4096)
    assert use.attainment == 0.5, "what failed kept nothing, and a client that left does not count"


def test_old_service_counts_less() -> None:
    now_s = 0.0
    figures = TenantFigures(lambda: now_s)
    figures.ended(record(0, "old", 97))
    now_s = 10 * WINDOW_S
    figures.ended(record(1, "new", 7))
    assert [use.tenant for use in figures.uses([])] == ["new", "old"]
    assert figures.uses([])[0].share > 0.99


def test_however_many_tenants_there_are_the_answer_is_bounded_and_nothing_is_lost() -> None:
    figures = TenantFigures(lambda: 0.0)
    for number in range(2 * MAX_KEPT):
        figures.ended(record(number, f"t{number}", 7))
    uses = figures.uses([record(0, f"new{number}") for number in range(500)])
    assert len(uses) == MAX_SHOWN and len(figures._totals) <= MAX_KEPT
    assert sum(use.total_tokens for use in uses) == 2 * MAX_KEPT * 10
    assert sum(use.num_running for use in uses) == 500
    assert sum(use.share for use in uses) == pytest.approx(1.0)
