"""Runs thousands of worlds: `make world`, or one of them again.

python -m tests.world --seeds 2000 [--first 0] [--processes 2]
python -m tests.world --seed 17 [--only 3,5]      one world, with these of its faults alone
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from tests.world.faults import Scenario, draw
from tests.world.shrink import shrink
from tests.world.world import run, without_faults

PROGRESS_PERIOD_S = 5.0
MOST_SHRUNK = 5  # failing seeds that are shrunk; the others are named


def report(seed: int, kept: list[int] | None = None) -> str:
    """How the world of `seed` fails, with the fewest faults it takes; empty where it does not."""
    scenario = draw(seed)
    indices = list(range(len(scenario.faults))) if kept is None else kept

    def fails(indices: list[int]) -> bool:
        return bool(run(without_faults(scenario, indices)).broken)

    if not fails(indices):
        return ""
    fewest = shrink(indices, fails)
    smallest = _with_fewer_requests(without_faults(scenario, fewest))
    only = ",".join(map(str, fewest)) or "none"
    lines = [
        f"seed {seed}: {run(without_faults(scenario, fewest)).broken}",
        f"  {scenario.num_instances} instances, {scenario.num_ingresses} ingresses,"
        f" {'elastic' if scenario.is_elastic else 'dp alone'}, poison {scenario.poison or 'none'},"
        f" requests {len(scenario.lengths)} (of which the failure needs {smallest})",
        *(f"  {index:3d}: {scenario.faults[index]}" for index in fewest),
        f"  again: PYTHONHASHSEED=0 .venv/bin/python -m tests.world --seed {seed} --only {only}",
    ]
    return "\n".join(lines)


def _with_fewer_requests(scenario: Scenario) -> str:
    """The requests without which nothing breaks; the others need not come."""

    def fails(numbers: list[int]) -> bool:
        arrivals = tuple(at_s if i in numbers else None for i, at_s in enumerate(scenario.arrivals_s))
        return bool(run(replace(scenario, arrivals_s=arrivals)).broken)

    return ", ".join(map(str, shrink(range(len(scenario.arrivals_s)), fails))) or "none"


def _one(seed: int) -> tuple[int, str, float]:
    outcome = run(draw(seed))
    return seed, outcome.broken, outcome.virtual_s


def many(first: int, num_seeds: int, num_processes: int) -> int:
    """Runs the worlds of these seeds; how many break a law. Shows how far it is, and the failures shrunk."""
    started_s, shown_s, virtual_s, failing = time.monotonic(), 0.0, 0.0, []
    with ProcessPoolExecutor(num_processes) as pool:
        for done, (seed, broken, seconds) in enumerate(pool.map(_one, range(first, first + num_seeds), chunksize=8), 1):
            virtual_s += seconds
            if broken:
                failing.append(seed)
                print(f"seed {seed}: {broken[:200]}", flush=True)
            if time.monotonic() - shown_s > PROGRESS_PERIOD_S or done == num_seeds:
                shown_s = time.monotonic()
                spent_s = shown_s - started_s
                print(
                    f"{done} of {num_seeds} worlds, {len(failing)} broken; {virtual_s:.0f} virtual seconds in"
                    f" {spent_s:.0f} s",
                    flush=True,
                )
        for text in pool.map(report, failing[:MOST_SHRUNK]):
            print(f"\n{text}", flush=True)
    return len(failing)


def main() -> int:
    """0 where no law was broken."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings are iterated: the order is part of the seed
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--only", help="... with these of its faults, such as 0,4, or none")
    options = parser.parse_args()
    if options.seed is None:
        return int(many(options.first, options.seeds, options.processes) > 0)
    kept = None
    if options.only is not None:
        kept = [] if options.only == "none" else [int(index) for index in options.only.split(",")]
    text = report(options.seed, kept)
    print(text or f"seed {options.seed}: all laws hold")
    return int(bool(text))


if __name__ == "__main__":
    sys.exit(main())
