"""`python -m benchmarks.fly`, from the root of the repository."""

import argparse
import dataclasses
import sys

from rich.console import Console

from benchmarks.fly import report
from benchmarks.fly.load import Plan
from benchmarks.fly.measure import SYSTEMS, Run, measure
from benchmarks.harness import has_model, option_parser, progress_bar, tell_written, today

LOADS = ("bursty", "mix")


def main() -> int:
    """Measures, prints and writes the tables; the exit code."""
    options = _options()
    console = Console(stderr=True)
    plan = make_plan(options)
    if not has_model(plan.model, console):
        return 2
    runs: list[Run] = []
    with progress_bar(console) as progress:
        total = plan.rounds * len(options.systems) * len(options.loads)
        task = progress.add_task("instances start", total=total)

        def on_run(run: Run) -> None:
            runs.append(run)
            shown = f"{run.load}, round {run.round_index + 1}, {report.NAMES[run.system]}"
            progress.update(task, advance=1, description=f"{shown}: {run.peak_tokens_per_s:.0f} tokens/s at most")

        capacity = measure(plan, options.systems, options.loads, on_run)
    date = today()
    sys.stdout.write(report.markdown(plan, capacity, runs, date))
    tell_written(console, report.write(options.output, plan, capacity, runs, date))
    return 1 if any(run.failed for run in runs) else 0


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan that the options describe."""
    plan = Plan(
        model=options.model.resolve(),
        rounds=options.rounds,
        num_instances=options.instances,
        num_mix_instances=options.mix_instances,
    )
    if options.tiny:
        plan = dataclasses.replace(
            plan,
            rounds=1,
            num_mix_instances=2,
            low_s=1.0,
            burst_s=1.5,
            after_s=1.0,
            mix_s=2.0,
            calibrate_s=1.0,
            settle_s=4.0,
        )
    return plan


def _options() -> argparse.Namespace:
    parser = option_parser("fly", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--instances", type=int, default=2, help="of the bursty load")
    parser.add_argument("--mix-instances", type=int, default=4, help="of the priority mix")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--tiny", action="store_true", help="seconds of load, one round: to see that it works")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
