"""`python -m benchmarks.bubbles`, from the root of the repository."""

import argparse
import dataclasses
import sys

from rich.console import Console

from benchmarks.bubbles import report
from benchmarks.bubbles.measure import WAYS, Plan, Run, measure
from benchmarks.harness import has_model, option_parser, progress_bar, tell_written, today
from tests.support.models import deep_model


def main() -> int:
    """Measures, prints and writes the tables; the exit code tells whether the aim was met."""
    options = _options()
    console = Console(stderr=True)
    plan = make_plan(options)
    if not has_model(plan.model, console):
        return 2
    runs: list[Run] = []
    with progress_bar(console) as progress:
        task = progress.add_task("instances start", total=plan.rounds * len(WAYS))

        def on_run(run: Run) -> None:
            runs.append(run)
            shown = f"round {run.round_index + 1}, {report.NAMES[run.way]}"
            progress.console.print(f"{shown}: {report.run_line(run)}", highlight=False)
            progress.update(task, advance=1, description=shown)

        measure(plan, on_run)
    date = today()
    sys.stdout.write(report.markdown(plan, runs, date))
    tell_written(console, report.write(options.output, plan, runs, date))
    return 0 if report.is_met(runs) else 1


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan that the options describe."""
    plan = Plan(model=options.model.resolve(), num_instances=options.instances, rounds=options.rounds)
    if options.tiny:
        plan = dataclasses.replace(plan, rounds=1, num_requests=40, most_tokens=200, output_tokens=(4, 8))
    return plan


def _options() -> argparse.Namespace:
    parser = option_parser("bubbles", __doc__)
    parser.set_defaults(model=deep_model())
    parser.add_argument("--instances", type=int, choices=(2, 4), default=2, help="stages of the pipeline")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="one round of short requests: to see that it works")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
