"""`python -m benchmarks.tiers`, from the root of the repository."""

import sys

from rich.console import Console

from benchmarks.harness import has_model, option_parser, progress_bar, tell_written, today
from benchmarks.tiers import report
from benchmarks.tiers.measure import Plan, Run, measure


def main() -> int:
    """Measures, prints and writes the tables; the exit code tells whether the aims were met."""
    parser = option_parser("tiers", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    console = Console(stderr=True)
    plan = Plan(model=options.model.resolve(), rounds=options.rounds)
    if not has_model(plan.model, console):
        return 2
    runs: list[Run] = []
    with progress_bar(console) as progress:
        task = progress.add_task("engines start", total=None)

        def on_run(run: Run) -> None:
            runs.append(run)
            shown = f"round {run.round_index + 1}, {run.system}"
            progress.console.print(f"{shown}: {report.run_line(run)}", highlight=False)
            progress.update(task, description=shown)

        measure(plan, on_run)
    date = today()
    sys.stdout.write(report.markdown(plan, runs, date))
    tell_written(console, report.write(options.output, plan, runs, date))
    return 0 if report.is_met(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
