"""`python -m benchmarks.switch`, from the root of the repository."""

import argparse
import dataclasses
import sys

from rich.console import Console

from benchmarks.harness import has_model, option_parser, progress_bar, tell_written, today
from benchmarks.switch import report
from benchmarks.switch.measure import STRATEGIES, Plan, Sample, measure, num_samples


def main() -> int:
    """Measures, prints and writes the tables; the exit code."""
    options = _options()
    console = Console(stderr=True)
    plan = make_plan(options)
    if not has_model(plan.model, console):
        return 2
    samples: list[Sample] = []
    with progress_bar(console) as progress:
        task = progress.add_task("instances start", total=num_samples(plan))

        def on_sample(sample: Sample) -> None:
            samples.append(sample)
            load = "loaded" if sample.is_loaded else "idle"
            progress.update(task, advance=1, description=f"{sample.num_instances} instances, {load}, {sample.strategy}")

        measure(plan, on_sample)
    date = today()
    sys.stdout.write(report.markdown(plan, samples, date))
    tell_written(console, report.write(options.output, plan, samples, date))
    return 0 if all(sample.report for sample in samples) else 1


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan that the options describe."""
    plan = Plan(
        model=options.model.resolve(),
        sizes=tuple(options.instances),
        strategies=tuple(options.strategies),
        repetitions=options.repetitions,
        idle_repetitions=2 * options.repetitions,
    )
    if options.tiny:
        plan = dataclasses.replace(
            plan, sizes=(2,), repetitions=1, idle_repetitions=1, streams_per_instance=2, output_tokens=400
        )
    return plan


def _options() -> argparse.Namespace:
    parser = option_parser("switch", __doc__)
    parser.add_argument("--instances", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--repetitions", type=int, default=10, help="of each switch under load; twice as many idle")
    parser.add_argument("--tiny", action="store_true", help="two instances, few streams, once: to see that it works")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
