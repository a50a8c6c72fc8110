"""What benchmarks have in common that start an engine for each system and round: `tiers` and `slo`."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from benchmarks.harness import DEMO_MODEL, has_model, option_parser, progress_bar, tell_written, today


class EngineRun(Protocol):
    """What one engine did in one round."""

    @property
    def system(self) -> str:
        """Its name."""

    @property
    def round_index(self) -> int:
        """Which round, from 0 on."""


class Report(Protocol):
    """A benchmark's module `report`."""

    def run_line(self, run: Any) -> str:
        """One run, in a line."""

    def markdown(self, plan: Any, runs: Sequence[Any], date: str) -> str:
        """All runs, for people."""

    def write(self, folder: Path, plan: Any, runs: Sequence[Any], date: str) -> tuple[Path, Path]:
        """Writes the result's files; their paths."""

    def is_met(self, runs: Sequence[Any]) -> bool:
        """Whether the aims were met."""


def run_engines(
    name: str,
    description: str | None,
    *,
    rounds: int,
    make_plan: Callable[..., Any],
    measure: Callable[[Any, Callable[[Any], None]], None],
    report: Report,
    make_model: Callable[[], Path] | None = None,
) -> int:
    """`python -m benchmarks.NAME`: measures, prints and writes the tables; the exit code says if the aims were met.

    Args:
        rounds: if the command line gives no number.
        make_plan: takes `model` and `rounds`.
        measure: makes all runs of a plan, and tells of each.
        make_model: makes the model where the command line names none; None: the demo model.
    """
    parser = option_parser(name, description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.set_defaults(model=None if make_model is not None else DEMO_MODEL)
    options = parser.parse_args()
    console = Console(stderr=True)
    model = options.model if make_model is None or options.model is not None else make_model()
    plan = make_plan(model=model.resolve(), rounds=options.rounds)
    if not has_model(plan.model, console):
        return 2
    runs: list[EngineRun] = []
    with progress_bar(console) as progress:
        task = progress.add_task("engines start", total=None)

        def on_run(run: EngineRun) -> None:
            runs.append(run)
            shown = f"round {run.round_index + 1}, {run.system}"
            progress.console.print(f"{shown}: {report.run_line(run)}", highlight=False)
            progress.update(task, description=shown)

        measure(plan, on_run)
    date = today()
    sys.stdout.write(report.markdown(plan, runs, date))
    tell_written(console, report.write(options.output, plan, runs, date))
    return 0 if report.is_met(runs) else 1
