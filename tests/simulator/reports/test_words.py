"""Numbers as people read them, and what a terminal shows of them."""

import io

import pytest
from rich.console import Console

from pengserve.simulator.progress import Advance, progress_on
from pengserve.simulator.reports import words
from pengserve.simulator.reports.runs import runs_of
from pengserve.simulator.reports.save import file_stem
from pengserve.simulator.reports.terminal import headline_table
from pengserve.simulator.run import Progress
from tests.simulator.reports.results import outcome, result


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, words.NONE), (0.0, "0 s"), (0.00142, "1.42 ms"), (0.0994, "99.4 ms"), (0.31, "0.310 s"),
        (12.54, "12.5 s"), (276.2, "4 min 36 s"), (3599.9, "1 h 00 min"), (3725.0, "1 h 02 min"),
    ],
)  # fmt: skip
def test_a_duration_has_three_digits_and_its_unit(value: float | None, text: str) -> None:
    assert words.seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (19366, "19,366"), (1.25e6, "1.25 M"), (3.4567e8, "345.7 M")])
def test_counts_have_thousands(value: float, text: str) -> None:
    assert words.count(value) == text


def test_almost_all_is_not_all() -> None:
    assert (words.percent(0.9996), words.percent(0.99999), words.percent(1.0)) == ("99.96 %", "99.99 %", "100.0 %")


def test_a_name_becomes_a_file_name() -> None:
    assert file_stem("azure hour/vllm_tp:degree=4") == "azure-hour-vllm_tp-degree-4"
    assert (file_stem("../.."), file_stem("")) == ("run", "run")


def test_the_table_has_a_column_for_each_run_and_ratios() -> None:
    slow = tuple(outcome(number, first_token_s=number + 1.5) for number in range(10))
    console = Console(file=io.StringIO(), width=100)
    console.print(headline_table(runs_of([result(name="fast"), result(name="slow", outcomes=slow)])))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].split() == ["fast", "slow"]
    assert lines[1].split() == ["TTFT", "P50", "0.500", "s", "1.50", "s", f"{words.TIMES}3.00"]


def test_the_bar_follows_the_slower_of_time_and_requests() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with progress_on(console) as progress:
        advance = Advance(progress, "run")
        advance(Progress(at_s=50.0, span_s=100.0, num_ended=10, num_requests=40))
        assert progress.tasks[0].completed == 0.25
        advance(Progress(at_s=200.0, span_s=100.0, num_ended=30, num_requests=40))
        assert progress.tasks[0].completed == 0.75
        advance.done()
        assert progress.finished
    assert "30 of 40 requests" in console.file.getvalue()  # type: ignore[attr-defined]


def test_where_nobody_looks_nothing_is_drawn() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with progress_on(console) as progress:
        Advance(progress, "run")(Progress(at_s=1.0, span_s=0.0, num_ended=0, num_requests=0))
    assert not console.file.getvalue().strip()  # type: ignore[attr-defined]
