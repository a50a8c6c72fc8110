"""Figures of real runs beside simulated ones."""

from pathlib import Path

import pytest

from benchmarks.validation.__main__ import tick_part
from benchmarks.validation.figures import Figure, figure_table, spread


@pytest.mark.parametrize(("simulated", "is_met"), [(1.15, True), (1.16, False), (0.85, True), (0.84, False)])
def test_a_figure_is_met_up_to_its_bar_on_both_sides(simulated: float, is_met: bool) -> None:
    assert Figure(what="TTFT", real=1.0, simulated=simulated, bar=0.15 + 1e-9).is_met is is_met


def test_a_missed_bar_is_said() -> None:
    lines = figure_table([Figure(what="mean TTFT", real=0.5, simulated=1.0, bar=0.15)])
    assert lines[-1] == "| mean TTFT | 500 ms | 1e+03 ms | +100.0% | 15% | missed |"


def test_a_figure_without_a_bar_is_never_missed() -> None:
    assert Figure(what="end", real=1.0, simulated=9.0, bar=None).is_met


def test_spread_gives_the_mean_first() -> None:
    assert spread([1.0, 2.0, 6.0], 50) == (3.0, 2.0)


@pytest.mark.parametrize(("said", "is_met"), [("19 ms, within", True), ("30 ms, NOT within", False)])
def test_a_tick_that_takes_too_long_is_a_missed_bar(tmp_path: Path, said: str, is_met: bool) -> None:
    (tmp_path / "tick.md").write_text(f"# Ticks\n\nA tick at 1000 instances: {said} 20 ms.\n", encoding="utf-8")
    lines, found = tick_part(tmp_path)
    assert found is is_met
    assert any(said in line for line in lines)
