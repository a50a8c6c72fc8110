"""Laws of tenants' limits: what is in flight is conserved, a bucket fills by real use and leaks, memory is bounded."""

from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.tenant_limits import TenantLimits, TenantRefusal, limits_of
from pengserve.planners.types.tenants import FairnessConfig, TenantConfig

CONFIG = FairnessConfig(
    default=TenantConfig(max_requests=3, max_tokens=100, tokens_per_minute=600),
    tenants={"free": TenantConfig()},
    max_tenants=10,
)


def test_where_no_tenant_has_a_limit_nothing_is_counted() -> None:
    assert limits_of(FairnessConfig(tenants={"a": TenantConfig(weight=2.0)})) is None


def test_a_tenant_has_so_many_sequences_in_flight_and_no_more() -> None:
    limits = TenantLimits(CONFIG)
    limits.take("a", 2)
    assert limits.why_not("a", 1, 0.0) is None
    refused = limits.why_not("a", 2, 0.0)
    assert refused is not None and refused.refusal is TenantRefusal.REQUESTS and refused.limit == 3
    assert limits.why_not("b", 3, 0.0) is None and limits.why_not("free", 1000, 0.0) is None
    limits.give_back("a", 2, 0.0)
    assert limits.why_not("a", 3, 0.0) is None


def test_a_tenant_with_all_its_tokens_in_flight_waits_for_an_end() -> None:
    limits = TenantLimits(CONFIG)
    limits.take("a", 1)
    limits.hold("a", 150)
    refused = limits.why_not("a", 1, 0.0)
    assert refused is not None and refused.refusal is TenantRefusal.TOKENS
    limits.use("a", 150, 20, 0.0)
    assert limits.why_not("a", 1, 0.0) is None


def test_a_minutes_tokens_come_back_within_a_minute() -> None:
    limits = TenantLimits(CONFIG)
    limits.hold("a", 900)
    limits.use("a", 900, 900, 100.0)
    refused = limits.why_not("a", 1, 100.0)
    assert refused is not None and refused.refusal is TenantRefusal.RATE and refused.retry_after_s == 31
    assert limits.why_not("a", 1, 129.0) is not None
    assert limits.why_not("a", 1, 131.0) is None


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4), st.integers(0, 500), st.integers(0, 500))))
def test_memory_is_bounded_and_nothing_is_left_in_flight(events: list[tuple[int, int, int, int]]) -> None:
    limits = TenantLimits(CONFIG)
    for now_s, (tenant, count, held, used) in enumerate(events):
        name = f"t{tenant}"
        limits.take(name, count)
        limits.hold(name, held)
        assert limits.in_flight(name) == (count, held)
        limits.use(name, held, used, float(now_s))
        limits.give_back(name, count, float(now_s))
        assert limits.in_flight(name) == (0, 0)
        assert len(limits) <= 10
