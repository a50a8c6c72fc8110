"""Laws of the page: whole, self-contained, small, the same bytes, and honest about peaks."""

import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.simulator.reports import words
from pengserve.simulator.reports.charts import Axis, Chart, log_axis, ticks
from pengserve.simulator.reports.html_report import write_page
from pengserve.simulator.reports.runs import runs_of
from pengserve.simulator.reports.sampling import distribution, histogram_distribution, thin_dots, thin_line
from tests.simulator.reports.results import large_result, moment, outcome, result

SECTIONS = [
    "headline", "memory", "layout", "instances", "ttft", "latency", "layouts", "slo", "queues", "figures",
    "assumptions", "config",
]  # fmt: skip
VOID = {"meta", "br"}


class Page(HTMLParser):
    """What a page holds; fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.links: list[str] = []
        self.num_charts = 0
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.num_charts += tag == "svg"
        if tag == "section":
            self.sections.append(given.get("id") or "")
        self.links += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset")]
        assert tag not in ("script", "link", "iframe", "img", "object")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def test_a_page_has_every_part_and_fetches_nothing() -> None:
    text = write_page(runs_of([result()]))
    page = Page(text)
    assert page.sections == SECTIONS
    assert page.num_charts == 11
    assert not page.links and "url(" not in text and "@import" not in text and "http" not in text


def test_a_comparison_has_a_chart_for_each_run_and_ratios_to_the_first() -> None:
    slow = tuple(outcome(number, first_token_s=number + 1.0) for number in range(10))
    text = write_page(runs_of([result(name="a"), result(name="b", policy="vllm_dp", outcomes=slow)]))
    page = Page(text)
    assert page.sections == SECTIONS and page.num_charts == 5 * 2 + 6
    row = re.search(r"<tr><td>TTFT P50</td>(.*?)</tr>", text)
    assert row is not None and "0.500 s" in row[1] and "1.00 s" in row[1] and f"{words.TIMES}2.00" in row[1]


def test_the_same_runs_give_the_same_bytes() -> None:
    def page() -> str:
        return write_page(runs_of([large_result(300, 120.0), large_result(300, 120.0, name="b", seed=1)]))

    assert page() == page()


def test_an_hour_of_twenty_thousand_requests_is_below_a_megabyte() -> None:
    text = write_page(runs_of([large_result()]))
    Page(text)
    assert len(text.encode()) < 1_000_000


def test_a_thousand_instances_are_drawn_as_shares() -> None:
    groups = " ".join([f"tp2@({i},{i + 1})" for i in range(0, 500, 2)] + [f"dp@({i})" for i in range(500, 1000)])
    run = result(num_instances=1000, moments=(moment(0.0, groups=groups), moment(6.0, groups=groups)), instance_kv=())
    text = write_page(runs_of([run]))
    Page(text)
    assert "share of instances" in text and len(text) < 100_000


def test_a_run_of_nothing_is_still_a_page() -> None:
    Page(write_page(runs_of([result(outcomes=(), moments=(), events=(), instance_kv=(), end_s=0.0)])))


def test_names_are_text_and_no_markup() -> None:
    bad = '<script>alert("x")</script>&'
    text = write_page(runs_of([result(name=bad, assumptions=(bad,), config={"name": bad}), result(name=bad)]))
    Page(text)
    assert "&lt;script&gt;" in text


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=3000), st.integers(1, 40))
def test_a_thinned_line_keeps_its_peaks_and_its_ends(heights: list[float], columns: int) -> None:
    points = [(float(index), height) for index, height in enumerate(heights)]
    kept = thin_line(points, columns, float(len(points)))
    assert len(kept) <= max(len(points), 1) and (len(points) <= 4 * columns or len(kept) <= 4 * columns)
    assert (min(kept, key=lambda p: p[1])[1], max(kept, key=lambda p: p[1])[1]) == (min(heights), max(heights))
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert all(a[0] < b[0] for a, b in pairwise(kept)) and set(kept) <= set(points)


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 200)), max_size=300))
def test_thinned_dots_leave_none_without_a_neighbour(dots: list[tuple[float, float]]) -> None:
    kept = thin_dots(dots, 2.0)
    assert set(kept) <= set(dots)
    assert all(any(abs(x - a) <= 2.0 and abs(y - b) <= 2.0 for a, b in kept) for x, y in dots)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=3000))
def test_a_distribution_keeps_the_least_and_the_largest_and_tells_true_shares(values: list[float]) -> None:
    found = distribution(values)
    assert found[0][0] == min(values) and found[-1] == (max(values), 1.0)
    assert found == sorted(found) and len(found) <= 400
    ranked = sorted(values)
    for value, share in found:
        assert ranked[round(share * len(ranked)) - 1] == value


def test_a_histogram_becomes_shares_at_the_upper_edges() -> None:
    assert histogram_distribution((1.0, 2.0, 4.0, 8.0), (0, 3, 1)) == [(2.0, 0.0), (4.0, 0.75), (8.0, 1.0)]
    assert histogram_distribution((1.0, 2.0), (0,)) == []


@given(st.floats(1e-3, 1e9), st.integers(2, 10))
def test_ticks_are_round_and_inside(most: float, count: int) -> None:
    found = ticks(most, count)
    assert found[0] == 0 and found[-1] <= most * (1 + 1e-9) and 1 <= len(found) <= count + 1


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=20))
def test_a_logarithmic_axis_holds_all_values_and_has_ticks(values: list[float]) -> None:
    axis = log_axis(values, title="", label=str)
    assert axis.low <= max(1e-4, min(values)) * (1 + 1e-9) and axis.high >= max(values) * (1 - 1e-9)
    assert axis.ticks()


@pytest.mark.parametrize("is_log", [False, True])
def test_nothing_is_drawn_outside_of_a_chart(is_log: bool) -> None:
    x, y = Axis(high=10.0), Axis(low=0.1, high=10.0, is_log=is_log)
    chart = Chart(x, y, title="t")
    chart.line([(-5.0, 1e-9), (3.0, 5.0), (99.0, 1e9)], "red")
    chart.dots([(-5.0, -1.0), (99.0, 1e9)], "red")
    chart.periods([(-3.0, 50.0)], "red")
    svg = chart.svg()
    for points in re.findall(r'class="(?:line|dots)"[^>]* d="([^"]*)"', svg):
        for at_x, at_y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", points):
            assert 62 <= float(at_x) <= 976 and 10 <= float(at_y) <= 204
