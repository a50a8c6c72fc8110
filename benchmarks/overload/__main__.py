"""`python -m benchmarks.overload`, from the root of the repository."""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.harness import has_model, option_parser, progress_bar, tell_written, today
from benchmarks.overload import report
from benchmarks.overload.compute import PEAK_RATE, bound_by_compute
from benchmarks.overload.load import PEAK_SHARE, Plan
from benchmarks.overload.measure import SYSTEMS, Run, Size, measure
from tests.support.models import even_model, shallow_model

DEFAULT_SYSTEMS = tuple(system for system in SYSTEMS if system != "pp")


def main() -> int:
    """Measures, writes tables and plots of each size as soon as it is done, prints the tables; the exit code."""
    options = options_of()
    console = Console(stderr=True)
    plans = {num_instances: make_plan(options, num_instances) for num_instances in options.sizes}
    if not all(has_model(plan.model, console) for plan in plans.values()):
        return 2
    logs = Path(tempfile.mkdtemp(prefix="pengserve-bench-"))
    console.print(f"vLLM's logs: {logs}", highlight=False)
    date, has_failed = today(), False
    written: list[Path] = []
    with progress_bar(console) as progress:
        total = len(plans) * options.rounds * len(options.systems)
        task = progress.add_task("instances start", total=total)

        def on_size(plan: Plan, size: Size) -> None:
            progress.console.print(report.load_line(plan, size), highlight=False)

        def on_run(run: Run) -> None:
            shown = f"{run.num_instances} instances, round {run.round_index + 1}, {report.NAMES[run.system]}"
            progress.console.print(f"{shown}: {report.run_line(run)}", highlight=False)
            progress.update(task, advance=1, description=shown)

        for num_instances, plan in plans.items():
            sized, size, runs = measure(plan, num_instances, options.systems, logs, on_size, on_run)
            has_failed |= any(run.failed for run in runs)
            written += report.write(options.output, sized, size, runs, date)
    for path in written:
        if path.suffix == ".md":
            sys.stdout.write(path.read_text(encoding="utf-8"))
    tell_written(console, written)
    return 1 if has_failed else 0


def make_plan(options: argparse.Namespace, num_instances: int) -> Plan:
    """The plan that the options describe for so many instances. A model of the user's own is the same for all."""
    model = options.model or even_model()
    is_compute_bound = options.bound == "compute"
    usual = PEAK_RATE if is_compute_bound else PEAK_SHARE
    plan = Plan(model=model.resolve(), rounds=options.rounds, peak_share=options.peak or usual)
    if options.model is None and num_instances > len(os.sched_getaffinity(0)):
        plan = plan.on_shared_cores(shallow_model())
    plan = plan.tiny() if options.tiny else plan
    return bound_by_compute(plan) if is_compute_bound else plan


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line, or of `arguments`."""
    parser = option_parser("overload", __doc__)
    parser.set_defaults(model=None)  # by size
    parser.add_argument("--sizes", nargs="+", type=int, choices=(2, 4, 8), default=[2, 4], help="instances")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--bound", choices=("memory", "compute"), default="memory", help="what a burst is too much for")
    parser.add_argument(
        "--peak",
        type=float,
        help=f"of demand in vLLM's dp, over what that holds ({PEAK_SHARE:g}); with --bound compute, of the requests of"
        f" a burst, over what dp answers ({PEAK_RATE:g})",
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(DEFAULT_SYSTEMS))
    parser.add_argument("--tiny", action="store_true", help="one round of short requests: to see that it works")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
