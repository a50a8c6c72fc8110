"""The headline figures as a table for a terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from pengserve.simulator.reports.runs import Run
from pengserve.simulator.reports.tables import headline_rows


def headline_table(runs: Sequence[Run]) -> Table:
    """A column for each run, with ratios to the first."""
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="bold")
    table.add_column("")
    for run in runs:
        table.add_column(run.title, justify="right", overflow="fold")
    figures = [run.figures for run in runs]
    for row in headline_rows():
        if all(row.get(one) is None for one in figures):
            continue
        cells = (Text.assemble(value, (f"  {ratio}", "dim") if ratio else "") for value, ratio in row.cells(figures))
        table.add_row(row.title, *cells)
    return table
