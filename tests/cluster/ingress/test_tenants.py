"""The refusals of tenants that have come to a limit: a status, a reason for programs, and when to try again."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("vllm")

from pengserve.cluster.ingress.errors import OverloadedError, respond
from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.cluster.ingress.request.request_options import RequestOptions
from pengserve.cluster.ingress.tenants.tenants import Tenants
from pengserve.planners.types.contract import Contract
from pengserve.planners.types.tenants import FairnessConfig, TenantConfig
from tests.support.moving import a_request

OPTIONS = RequestOptions(contract=Contract(tenant="a"))


@contextmanager
def refused() -> Iterator[list[OverloadedError]]:
    found: list[OverloadedError] = []
    with pytest.raises(OverloadedError) as caught:
        yield found
    found.append(caught.value)


def test_a_refusal_says_why_for_people_and_for_programs() -> None:
    tenants = Tenants(FairnessConfig(default=TenantConfig(max_requests=1)))
    with tenants.place("a", 1), refused() as found, tenants.place("a", 1):
        pass
    answer = respond(found[0])
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert answer.headers["x-pengserve-dropped-reason"] == "tenant-requests"
    assert b"This tenant may have 1 sequences in flight" in answer.body
    with tenants.place("a", 1):
        pass


@pytest.mark.parametrize(("cached", "is_free"), [(0, False), (3, True)])
def test_what_a_prefix_cache_held_is_not_used(cached: int, is_free: bool) -> None:
    now_s = 10.0
    tenants = Tenants(FairnessConfig(default=TenantConfig(tokens_per_minute=6)), lambda: now_s)
    record = RequestRecord(a_request(0, 4), OPTIONS)
    tenants.come(record.request, OPTIONS)
    record.first_token_s, record.num_cached_tokens = now_s, cached
    record.output_token_ids += [7, 7, 7, 7]
    tenants.ended(record)
    if is_free:
        with tenants.place("a", 1):
            pass
    else:
        with refused() as found, tenants.place("a", 1):
            pass
        assert found[0].dropped_reason == "tenant-tokens-per-minute" and found[0].retry_after_s == 11


def test_without_limits_nothing_is_held() -> None:
    tenants = Tenants(FairnessConfig())
    tenants.come(a_request(0, 4), OPTIONS)
    assert tenants.limits is None and not tenants._held
