"""`python -m benchmarks.cost_model`, from the root of the repository."""

import argparse
import dataclasses
import sys

from rich.console import Console

from benchmarks.cost_model import report
from benchmarks.cost_model.measure import Plan, evaluate, measure
from benchmarks.harness import has_model, option_parser, progress_bar, tell_written, today


def main() -> int:
    """Measures, prints and writes the tables; the exit code tells whether the aims were met."""
    options = _options()
    console = Console(stderr=True)
    plan = make_plan(options)
    if not has_model(plan.model, console):
        return 2
    with progress_bar(console) as progress:
        task = progress.add_task("batches timed", total=plan.num_batches * plan.rounds)
        samples = measure(plan, lambda: progress.update(task, advance=1))
    result = evaluate(plan, samples)
    date = today()
    sys.stdout.write(report.markdown(plan, result, date))
    tell_written(console, report.write(options.output, plan, result, date))
    return 0 if report.is_met(result) else 1


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan that the options describe."""
    plan = Plan(model=options.model.resolve(), num_batches=options.batches, rounds=options.rounds)
    if options.tiny:
        plan = dataclasses.replace(plan, num_batches=24, rounds=1, repetitions=1)
    return plan


def _options() -> argparse.Namespace:
    parser = option_parser("cost_model", __doc__)
    parser.add_argument("--batches", type=int, default=150, help="different batches to time")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="few batches, once: to see that it works")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
