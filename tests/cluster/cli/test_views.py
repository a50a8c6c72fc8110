"""Laws of the bars and rates that `pengserve top` draws."""

from hypothesis import given
from hypothesis import strategies as st

from pengserve.cluster.cli.views import bar, hit_rate, rates_between
from tests.cluster.client.cluster_server import instance

SHARES = st.lists(st.floats(min_value=0, max_value=1.5), max_size=4)


@given(shares=SHARES, width=st.integers(min_value=1, max_value=60))
def test_a_bar_has_its_width_whatever_the_shares(shares, width):
    assert len(bar([(share, "x", "") for share in shares], width).plain) == width


@given(share=st.floats(min_value=1e-9, max_value=1.0))
def test_a_little_is_not_nothing(share):
    assert bar([(share, "x", "")]).plain.startswith("x")


def test_an_empty_bar_is_empty_and_a_full_one_full():
    assert bar([(0.0, "x", "")], 4).plain == "····"
    assert bar([(1.0, "x", "")], 4).plain == "xxxx"


def test_rates_need_two_moments_of_one_life():
    now = instance(0, total_generated_tokens=30, total_prompt_tokens=10)
    assert rates_between(None, now, 1.0) is None
    assert rates_between(now, now, 0.0) is None
    assert rates_between(instance(0, incarnation=1), now, 1.0) is None
    rates = rates_between(instance(0), now, 2.0)
    assert (rates.prompt_tokens_per_s, rates.generated_tokens_per_s) == (5.0, 15.0)


def test_no_lookups_is_no_hit_rate():
    assert hit_rate([instance(0)]) is None
    assert hit_rate([instance(0, total_prefix_queries=8, total_prefix_hits=2)]) == 0.25
