"""`python -m benchmarks.overhead`, from the root of the repository."""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
    "pengserve-elastic": lambda logs: PengServeUp(logs, name="pengserve-elastic", settings=ELASTIC, shares_memory=True),
}
ON_CPUS, ON_GPUS = ("vllm", "vllm-uni", "ray-llm", "pengserve"), ("vllm", "pengserve", "pengserve-elastic")


def main() -> int:
    """Runs all systems in turn, prints the table, writes the result; the exit code."""
    options = _options()
    console = Console(stderr=True)
    model, rounds = options.model.resolve(), options.rounds
    names = options.systems or (ON_GPUS if options.gpus else ON_CPUS)
    num_sharing = len(names) if options.together else 1
    if options.gpus:
        plan = Plan.on_gpus(model, rounds, options.gpus, num_sharing)
    else:
        plan = Plan(model=model, rounds=rounds, num_sharing=num_sharing)
    if not has_model(plan.model, console):
        return 2
    if "ray-llm" in names:
        console.print("environment of ray.serve.llm (minutes, the first time)")
        make_environment()
    logs = Path(tempfile.mkdtemp(prefix="pengserve-bench-"))
    console.print(f"server logs: {logs}", highlight=False)
    systems = [SYSTEMS[name](logs) for name in names]
    samples: list[Sample] = []
    try:
        with all_up(systems, plan) if options.together else contextlib.nullcontext({}) as up:
            for round_index in range(plan.rounds):
                for system in systems[:: -1 if round_index % 2 else 1]:
                    samples += _one_round(system, plan, round_index, console, up.get(system.name))
    except StartError as error:
        console.print(f"no server: {error}", highlight=False, markup=False)
        return 1
    report.print_table(samples, Console(width=max(console.width, TABLE_WIDTH)))
    notes = {system.name: system.notes for system in systems}
    tell_written(console, report.write(options.output, plan, notes, samples, today()))
    for failure in report.failures(samples):
        console.print(failure)
    return 0


@dataclass(frozen=True, slots=True)
class Up:
    """A system that serves."""

    urls: list[str]
    start_s: float  # what its start took


@contextlib.contextmanager
def all_up(systems: Sequence[System], plan: Plan) -> Iterator[dict[str, Up]]:
    """Starts all at the same time, and stops them in the end; by name.

    Raises:
        StartError: one of them did not start.
    """
    try:
        with ThreadPoolExecutor(len(systems)) as pool:
            found = list(pool.map(lambda system: _started(system, plan), systems))
        yield {system.name: up for system, up in zip(systems, found, strict=True)}
    finally:
        for system in systems:
            system.stop()


def _started(system: System, plan: Plan) -> Up:
    began_s = time.monotonic()
    urls = system.start(plan)
    return Up(urls, time.monotonic() - began_s)


def _one_round(system: System, plan: Plan, round_index: int, console: Console, up: Up | None) -> list[Sample]:
    """Of a system that is up, or of one that is started for this round alone."""
    try:
        now = up or _started(system, plan)
        start_s, figures = now.start_s, measure(plan, now.urls, round_index)
    finally:
        if up is None:
            system.stop()
    shown = ", ".join(f"{one.num_clients} clients {one.tokens_per_s:.0f} tok/s" for one in figures)
    where = f"round {round_index + 1}/{plan.rounds} {system.name}"
    console.print(f"{where}: up in {start_s:.0f} s; {shown}", soft_wrap=True)
    return [Sample(system=system.name, round_index=round_index, start_s=start_s, figures=one) for one in figures]


def _options() -> argparse.Namespace:
    parser = option_parser("overhead", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="all that the devices have, if not given")
    parser.add_argument(
        "--together", action="store_true", help="all systems stay up, on GPUs that have room for all at the same time"
    )
    parser.add_argument("--gpus", type=int, default=0, help="instances on GPUs, one on each; 0: two on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
