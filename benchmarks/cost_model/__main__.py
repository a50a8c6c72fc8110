"""`python -m benchmarks.cost_model`, from the root of the repository."""

import argparse
import dataclasses
import datetime
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.cost_model import report
from benchmarks.cost_model.measure import Plan, evaluate, measure

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Measures, prints and writes the tables; the exit code tells whether the aims were met."""
    options = _options()
    console = Console(stderr=True)
    plan = make_plan(options)
    if not (plan.model / "config.json").exists():
        console.print(f"{plan.model} holds no model: run `make model`, or give --model")
        return 2
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("batches timed", total=plan.num_batches * plan.rounds)
        samples = measure(plan, lambda: progress.update(task, advance=1))
    result = evaluate(plan, samples)
    date = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d")
    sys.stdout.write(report.markdown(plan, result, date))
    for path in report.write(options.output, plan, result, date):
        console.print(f"wrote {path}", highlight=False)
    return 0 if report.is_met(result) else 1


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan that the options describe."""
    plan = Plan(model=options.model.resolve(), num_batches=options.batches, rounds=options.rounds)
    if options.tiny:
        plan = dataclasses.replace(plan, num_batches=24, rounds=1, repetitions=1)
    return plan


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / ".pengserve" / "demo-model", help="model directory")
    parser.add_argument("--batches", type=int, default=150, help="different batches to time")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="few batches, once: to see that it works")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
