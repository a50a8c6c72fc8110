"""`python -m benchmarks.overhead`, from the root of the repository."""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks.harness import has_model, option_parser, tell_written, today
from benchmarks.overhead import report
from benchmarks.overhead.load import measure
from benchmarks.overhead.plan import Plan
from benchmarks.overhead.report import Sample
from benchmarks.overhead.systems.base import StartError, System
from benchmarks.overhead.systems.pengserve import PengServeUp
from benchmarks.overhead.systems.ray_llm import RayLlm, make_environment
from benchmarks.overhead.systems.vllm_server import VllmServers

TABLE_WIDTH = 150  # columns; a narrower terminal or a pipe would cut the ratios off
ELASTIC = {"shape": {"cuda": "experimental", "auto": False}}  # may change its shape, and does not
SYSTEMS: dict[str, Callable[[Path], System]] = {
    "vllm": VllmServers,
    "vllm-uni": lambda logs: VllmServers(logs, in_engine_process=True),
    "ray-llm": RayLlm,
    "pengserve": PengServeUp,
    "pengserve-elastic": lambda logs: PengServeUp(logs, name="pengserve-elastic", settings=ELASTIC),
}
ON_CPUS, ON_GPUS = ("vllm", "vllm-uni", "ray-llm", "pengserve"), ("vllm", "pengserve", "pengserve-elastic")


def main() -> int:
    """Runs all systems in turn, prints the table, writes the result; the exit code."""
    options = _options()
    console = Console(stderr=True)
    model, rounds = options.model.resolve(), options.rounds
    plan = Plan.on_gpus(model, rounds, options.gpus) if options.gpus else Plan(model=model, rounds=rounds)
    names = options.systems or (ON_GPUS if options.gpus else ON_CPUS)
    if not has_model(plan.model, console):
        return 2
    if "ray-llm" in names:
        console.print("environment of ray.serve.llm (minutes, the first time)")
        make_environment()
    logs = Path(tempfile.mkdtemp(prefix="pengserve-bench-"))
    console.print(f"server logs: {logs}", highlight=False)
    systems = [SYSTEMS[name](logs) for name in names]
    samples: list[Sample] = []
    for round_index in range(plan.rounds):
        for system in systems:
            try:
                samples += _one_round(system, plan, round_index, console)
            except StartError as error:
                console.print(f"{system.name} did not start: {error}", highlight=False, markup=False)
                return 1
    report.print_table(samples, Console(width=max(console.width, TABLE_WIDTH)))
    notes = {system.name: system.notes for system in systems}
    tell_written(console, report.write(options.output, plan, notes, samples, today()))
    for failure in report.failures(samples):
        console.print(failure)
    return 0


def _one_round(system: System, plan: Plan, round_index: int, console: Console) -> list[Sample]:
    try:
        began_s = time.monotonic()
        urls = system.start(plan)
        start_s = time.monotonic() - began_s
        figures = measure(plan, urls, round_index)
    finally:
        system.stop()
    shown = ", ".join(f"{one.num_clients} clients {one.tokens_per_s:.0f} tok/s" for one in figures)
    where = f"round {round_index + 1}/{plan.rounds} {system.name}"
    console.print(f"{where}: up in {start_s:.0f} s; {shown}", soft_wrap=True)
    return [Sample(system=system.name, round_index=round_index, start_s=start_s, figures=one) for one in figures]


def _options() -> argparse.Namespace:
    parser = option_parser("overhead", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="all that the devices have, if not given")
    parser.add_argument("--gpus", type=int, default=0, help="instances on GPUs, one on each; 0: two on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
