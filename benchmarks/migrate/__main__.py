"""`python -m benchmarks.migrate`, from the root of the repository."""

import argparse
import dataclasses
import sys

from rich.console import Console

from benchmarks.harness import has_model, option_parser, progress_bar, tell_written, today
from benchmarks.migrate import report
from benchmarks.migrate.measure import Plan, Sample, measure


def main() -> int:
    """Measures, prints and writes the table; the exit code."""
    options = _options()
    console = Console(stderr=True)
    plan = make_plan(options)
    if not has_model(plan.model, console):
        return 2
    samples: list[Sample] = []
    with progress_bar(console) as progress:
        task = progress.add_task("instances start", total=plan.repetitions + plan.drains)

        def on_sample(sample: Sample) -> None:
            samples.append(sample)
            progress.update(task, advance=1, description=report.NAMES[sample.what])

        rate = measure(plan, on_sample)
    date = today()
    sys.stdout.write(report.markdown(plan, samples, rate, date))
    tell_written(console, report.write(options.output, plan, samples, rate, date))
    return 1 if report.failures(samples) else 0


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan that the options describe."""
    plan = Plan(
        model=options.model.resolve(), repetitions=options.repetitions, drains=options.drains, streams=options.streams
    )
    if options.tiny:
        plan = dataclasses.replace(plan, repetitions=1, drains=1, streams=4, prompt_words=100)
    return plan


def _options() -> argparse.Namespace:
    parser = option_parser("migrate", __doc__)
    parser.add_argument("--repetitions", type=int, default=10, help="of the migration of one stream")
    parser.add_argument("--drains", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16, help="of each instance when one of them is drained")
    parser.add_argument("--tiny", action="store_true", help="few streams, once: to see that it works")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
