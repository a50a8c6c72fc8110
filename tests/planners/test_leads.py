"""Laws of leads: who takes more than its share where places are short is ahead, and no one else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.leads import CREDIT_S, PRESENT_S, Leads

STEP_S = 0.1


def serve(leads: Leads, rates: dict[str, float], seconds: float, from_s: float = 0.0, weight: float = 1.0) -> float:
    """Charges tenants at these rates, in virtual seconds a second; the time afterwards."""
    now_s = from_s
    for _ in range(round(seconds / STEP_S)):
        now_s += STEP_S
        for name, rate in rates.items():
            leads.charge(name, weight, rate * STEP_S, now_s)
            leads.is_ahead(name, 0.0, now_s)
    return now_s


def ahead(leads: Leads, names: str, now_s: float) -> set[str]:
    return {name for name in names if leads.is_ahead(name, 0.0, now_s)}


def test_a_flood_is_ahead_and_tenants_within_their_shares_are_not() -> None:
    leads = Leads()
    now_s = serve(leads, {"f": 0.7, "a": 0.1, "b": 0.1, "c": 0.1}, 10.0)
    assert ahead(leads, "fabc", now_s) == {"f"}


def test_two_floods_are_both_ahead() -> None:
    leads = Leads()
    now_s = serve(leads, {"f": 0.4, "g": 0.4, "a": 0.1, "b": 0.1}, 15.0)
    assert ahead(leads, "fgab", now_s) == {"f", "g"}


def test_tenants_that_are_served_alike_are_not_ahead_and_one_alone_never_is() -> None:
    leads = Leads()
    now_s = serve(leads, {"a": 0.5, "b": 0.5}, 30.0)
    assert ahead(leads, "ab", now_s) == set()
    alone = Leads()
    assert ahead(alone, "f", serve(alone, {"f": 1.0}, 30.0)) == set()


def test_a_tenant_that_was_alone_owes_nothing_to_one_that_comes() -> None:
    """Two that both flood from now on are served alike at once."""
    leads = Leads()
    now_s = serve(leads, {"old": 1.0}, 60.0)
    leads.see("new", 1.0, now_s)
    assert ahead(leads, "old", now_s) == set()
    now_s = serve(leads, {"old": 0.5, "new": 0.5}, 20.0, now_s)
    assert not leads.is_ahead("old", 0.0, now_s) and not leads.is_ahead("new", 0.0, now_s)


def test_a_flood_that_ends_is_soon_forgiven_and_so_is_what_was_saved() -> None:
    leads = Leads()
    now_s = serve(leads, {"f": 0.9, "a": 0.1}, 300.0)
    assert ahead(leads, "fa", now_s) == {"f"}
    now_s = serve(leads, {"f": 0.1, "a": 0.9}, 10.0, now_s)
    assert not leads.is_ahead("f", 0.0, now_s)
    now_s = serve(leads, {"f": 0.1, "a": 0.9}, 3 * CREDIT_S, now_s)
    assert leads.is_ahead("a", 0.0, now_s), "credit ends"


def test_while_there_is_room_for_all_nothing_counts_and_leads_fade() -> None:
    leads = Leads()
    now_s = serve(leads, {"f": 0.9, "a": 0.1}, 10.0)
    assert ahead(leads, "fa", now_s) == {"f"}
    leads.is_short = False
    now_s = serve(leads, {"f": 0.9, "a": 0.1}, 20.0, now_s)
    assert ahead(leads, "fa", now_s) == set()


def test_who_was_served_most_is_known_though_there_was_room_for_all() -> None:
    leads = Leads()
    leads.is_short = False
    now_s = serve(leads, {"f": 0.8, "a": 0.1}, 10.0)
    assert ahead(leads, "fa", now_s) == set()
    assert leads.used("f", now_s) > 4 * leads.used("a", now_s) and leads.used("unknown", now_s) == 0.0
    assert leads.used("f", now_s + 50.0) < 0.1, "and forgotten"


def test_one_that_is_put_ahead_stays_so_until_it_is_served_less() -> None:
    leads = Leads()
    now_s = serve(leads, {"f": 0.5, "a": 0.5}, 10.0)
    leads.put_ahead("f", 0.5, now_s)
    assert leads.is_ahead("f", 0.5, now_s)
    now_s = serve(leads, {"f": 0.2, "a": 0.8}, 3.0, now_s)
    assert not leads.is_ahead("f", 0.5, now_s)


def test_who_is_not_seen_any_more_has_no_share() -> None:
    leads = Leads()
    now_s = serve(leads, {"f": 0.5, "a": 0.5}, 5.0)
    leads.see("f", 1.0, now_s + PRESENT_S + 1)
    assert len(leads) == 1 and not leads.is_ahead("a", 0.0, now_s + PRESENT_S + 1)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(-1, 5)), min_size=1, max_size=60))
def test_leads_are_zero_in_all_where_nothing_was_bounded_or_forgotten(
    charges: list[tuple[str, float]],
) -> None:
    """Conservation: what one tenant is ahead, the others are behind, by weight."""
    leads, weights = Leads(), {"a": 1.0, "b": 2.0, "c": 0.5, "d": 3.0}
    for name, weight in weights.items():
        leads.see(name, weight, 0.0)
    for name, virtual_s in charges:
        leads.charge(name, weights[name], virtual_s, 0.0)
    tenants = leads._tenants
    total = sum(weights[name] * (found.lead + found.fair - leads._fair) for name, found in tenants.items())
    assert total == pytest.approx(0.0, abs=1e-6)
