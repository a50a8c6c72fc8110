"""What placing KV by SLOs costs the planner: `python -m benchmarks.placements`; writes `results/placements.md`.

Random batches of 64 requests and 80 layers whose KV is more than the device holds, in processor time of one thread.
"""

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import percentile
from benchmarks.harness import RESULTS, today
from benchmarks.result_files import cpu_model, table
from pengserve.planners.placement.solver import fallback, solve, whole
from pengserve.planners.placement.spread import RESIDENT, Spread
from pengserve.planners.placement.values import Decode, Machine, PlacementConfig, Solution
from pengserve.planners.placement.worth import solve_where_it_pays

NUM_REQUESTS, NUM_LAYERS, BLOCK_SIZE = 64, 80, 16
LIMIT_MS = 5.0  # P99 of what instances call
AS_PLANNED = "the search, where it pays"


def none_away(requests: list[Decode], machine: Machine, config: PlacementConfig) -> Solution | None:
    """`whole`, with when it expires."""
    found = whole(requests, machine, config)
    return found.solution() if found is not None else None


CONFIG = PlacementConfig()
PLANNERS: dict[str, Callable[[list[Decode], Machine, PlacementConfig], object]] = {
    "the search alone": solve,
    AS_PLANNED: solve_where_it_pays,
    "at once: none away": none_away,
    "at once: one distance for all": fallback,
}


def batch(seed: int) -> tuple[list[Decode], Machine]:
    """Requests of 300 to 12,000 tokens, of which the device holds 30 to 95 %; some have layers away, or are paused."""
    chance = random.Random(seed)
    requests = [
        Decode(
            request_id=f"r{i}",
            num_tokens=chance.randrange(300, 12_000),
            slo_s=chance.choice([None, 0.06, 0.1]),
            deposit_tokens=chance.choice([0, 0, 30]),
            paused_s=chance.choice([None, None, None, 1.0]),
            spread=chance.choice([RESIDENT, Spread(2, 1), Spread(5, 4)]),
            is_on_host=chance.random() < 0.8,
            rank=(0, float(i)),
        )
        for i in range(NUM_REQUESTS)
    ]
    whole_cells = NUM_LAYERS * sum(request.num_tokens // BLOCK_SIZE + 1 for request in requests)
    machine = Machine(
        num_layers=NUM_LAYERS,
        block_size=BLOCK_SIZE,
        num_cells=int(whole_cells * chance.uniform(0.3, 0.95)),
        step_s=0.04,
        context_s=3e-8,
        cells_per_s=10 ** chance.uniform(5.0, 7.5),
        staged_s=chance.choice([0.0, 0.001]),
    )
    return requests, machine


def measured(num_batches: int) -> dict[str, list[float]]:
    """Milliseconds of each planner for each batch."""
    batches, found = [batch(seed) for seed in range(num_batches)], {name: list[float]() for name in PLANNERS}
    for planner in PLANNERS.values():
        planner(*batches[0], CONFIG)  # fills the caches
    gc.collect()
    gc.freeze()
    for requests, machine in batches:
        for name, planner in PLANNERS.items():
            started_s = time.thread_time()
            planner(requests, machine, CONFIG)
            found[name].append(1e3 * (time.thread_time() - started_s))
    return found


def report(found: dict[str, list[float]], load: float) -> str:
    """The table, as Markdown. `load` is the machine's load average before the run."""
    worst = percentile(found[AS_PLANNED], 99)
    rows = [[name, f"{statistics.median(ms):.2f}", f"{percentile(ms, 99):.2f}"] for name, ms in found.items()]
    count = len(next(iter(found.values())))
    return "\n".join(
        [
            "# What placing KV by SLOs costs the planner",
            "",
            f"`python -m benchmarks.placements` on {today()}: {cpu_model()}, {os.cpu_count()} cores; load average"
            f" before the run, from other work: {load:.1f}. {count} random batches of {NUM_REQUESTS} requests and"
            f" {NUM_LAYERS} layers whose KV is more than the device holds; processor time of one thread.",
            "",
            f"{AS_PLANNED.capitalize()}: 99th percentile {worst:.1f} ms,"
            f" {'within' if worst <= LIMIT_MS else 'NOT within'} {LIMIT_MS:g} ms.",
            "",
            *table(["planner", "median, ms", "P99, ms"], rows, 1),
            "",
        ]
    )


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placements", description=__doc__)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULTS / "placements.md")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    text = report(measured(options.batches), load)
    options.output.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
