"""Laws of counters that ingresses share: what is charged anywhere counts everywhere, once; memory is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.fairness import FairConfig, FairShares
from pengserve.planners.shared_usage import FRESH_S, UsageLedger
from pengserve.planners.types.tenants import UsageReport


class Ingress:
    """One ingress's counters, and its reports."""

    def __init__(self, name: str, ledger: UsageLedger) -> None:
        self.name, self.ledger, self.shares, self.number = name, ledger, FairShares(FairConfig()), 0

    def serve(self, tenant: str, cost_s: float) -> None:
        self.number += 1
        name = str(self.number)
        self.shares.add(name, tenant, "default", 0, cost_s, 0.0)
        self.shares.charge(name, cost_s, 0.0)

    def report(self, now_s: float = 0.0) -> None:
        shares = self.shares
        report = UsageReport(charges=shares.take_usage(), tenants=shares.active(), least_active=shares.least_active())
        shared = self.ledger.share(self.name, report, now_s)
        shares.merge(shared.counters, shared.least_active)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.floats(0.1, 9.0)), max_size=60))
def test_what_is_charged_anywhere_counts_everywhere_once(events: list[tuple[int, bool, float]]) -> None:
    """Two equal tenants, active at all three ingresses from the start: nothing is lifted."""
    ledger = UsageLedger()
    ingresses = [Ingress(str(index), ledger) for index in range(3)]
    total = 0.0
    for ingress in ingresses:
        ingress.shares.add("open", "t", "default", 0, 1.0, 0.0)
        ingress.report()
    for index, is_report, cost_s in events:
        if is_report:
            ingresses[index].report()
        else:
            ingresses[index].serve("t", cost_s)
            total += cost_s
    for _ in range(2):
        for ingress in ingresses:
            ingress.report()
    for ingress in ingresses:
        assert ingress.shares.served()["t"] == pytest.approx(total)


def test_a_controller_that_begins_anew_has_counters_back() -> None:
    first, second = UsageLedger(), UsageLedger()
    ingress = Ingress("a", first)
    ingress.serve("t", 5.0)
    ingress.report()
    ingress.ledger = second
    ingress.serve("t", 2.0)
    ingress.report()
    other = Ingress("b", second)
    other.serve("t", 1.0)
    other.report()
    assert other.shares.served()["t"] == pytest.approx(8.0)


def test_a_report_that_was_not_heard_is_told_again() -> None:
    ledger, ingress = UsageLedger(), Ingress("a", UsageLedger())
    ingress.serve("t", 5.0)
    ingress.shares.return_usage(ingress.shares.take_usage())
    ingress.ledger = ledger
    ingress.report()
    other = Ingress("b", ledger)
    other.serve("t", 1.0)
    other.report()
    assert other.shares.served()["t"] == pytest.approx(6.0)


def test_a_newcomer_begins_where_the_least_active_of_all_ingresses_is() -> None:
    ledger = UsageLedger()
    busy, quiet = Ingress("a", ledger), Ingress("b", ledger)
    for _ in range(3):
        busy.serve("flood", 10.0)
    busy.report(0.0)
    quiet.report(0.1)
    quiet.shares.add("guest", "guest", "default", 0, 1.0, 0.2)
    assert quiet.shares.served()["guest"] == pytest.approx(20.0), "before the flood's newest request began"
    quiet.report(0.2 + 2 * FRESH_S)
    quiet.shares.add("late", "late", "default", 0, 1.0, 20.0)
    assert quiet.shares.served()["late"] == pytest.approx(20.0), "never back"


def test_ten_thousand_tenants_are_the_most() -> None:
    ledger = UsageLedger(max_tenants=4)
    for index in range(20):
        ledger.share("a", UsageReport(charges={f"t{index}": (1.0, 0.0)}), 0.0)
    names = tuple(f"t{index}" for index in range(20))
    assert set(ledger.share("a", UsageReport(tenants=names), 0.0).counters) == {"t16", "t17", "t18", "t19"}
