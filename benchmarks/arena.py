"""What it costs to remap half the layers from weights to KV: `python -m benchmarks.arena`; writes `results/arena.md`.

A CPU arena of 1 GiB, two thirds of it weights of 14 layers, the rest their KV. The weights of the first half go to the
KV tails of the second half, each layer's to one tail, and back. All memory was written before, as in an engine, so that
the page tables to take down are full. "First touch" writes one byte per 4 KiB of all the grown tails.
"""

import argparse
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from itertools import product
from pathlib import Path

import torch

from pengserve.planners.types.units import GIB, KIB, MIB, format_bytes
from pengserve.replicas.memory.arena.arena import Arena, ArenaCounters, Region
from pengserve.replicas.memory.arena.cpu import CpuBackend

RESULTS = Path(__file__).parent / "results" / "arena.md"
NUM_LAYERS = 14
CHUNKS = (64 * KIB, 256 * KIB, 2 * MIB, 4 * MIB, 16 * MIB)
NUM_ROUNDS = 30
SMALL_PAGE_BYTES = 4096
LIMIT_MS = 5.0  # what a remap of half the layers may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One way to have an arena."""

    chunk_bytes: int
    huge_pages: bool = True
    populate: bool | None = None  # as in `CpuBackend`
    is_scattered: bool = False  # no two chunks of a layer lie together: the most calls there can be


@dataclass(slots=True, kw_only=True)
class Figures:
    """What one setup took, a value a round."""

    moved_bytes: int
    page_bytes: int  # that the system gave
    populates: bool
    open_s: float
    calls: ArenaCounters = field(default_factory=ArenaCounters)  # of one drop
    drop_s: list[float] = field(default_factory=list)
    first_touch_s: list[float] = field(default_factory=list)
    second_touch_s: list[float] = field(default_factory=list)
    restore_s: list[float] = field(default_factory=list)


def main() -> None:
    """Runs all, prints and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    setups = [Setup(chunk_bytes=chunk_bytes) for chunk_bytes in CHUNKS]
    setups += [Setup(chunk_bytes=chunk_bytes, populate=chunk_bytes < 2 * MIB) for chunk_bytes in CHUNKS]
    setups += [
        Setup(chunk_bytes=chunk_bytes, huge_pages=False, populate=populate)
        for populate, chunk_bytes in product((False, True), CHUNKS)
    ]
    setups += [Setup(chunk_bytes=chunk_bytes, is_scattered=True) for chunk_bytes in CHUNKS]
    results = {setup: measure(setup, GIB, arguments.rounds) for setup in setups}
    text = report(results, baselines(336 * MIB, arguments.rounds), GIB, load)
    arguments.output.write_text(text)
    sys.stdout.write(text)


def measure(setup: Setup, arena_bytes: int, num_rounds: int) -> Figures:
    """Drops and restores half the layers `num_rounds` times, after one that does not count."""
    gc.collect()
    start_s = time.perf_counter()
    backend = CpuBackend(huge_pages=setup.huge_pages, populate=setup.populate)
    arena = Arena(backend, arena_bytes, setup.chunk_bytes)
    opened_s = time.perf_counter() - start_s
    per_layer = arena.num_chunks * 2 // 3 // NUM_LAYERS
    kv_chunks = arena.num_chunks // NUM_LAYERS - per_layer
    weights = [arena.reserve(per_layer * setup.chunk_bytes, f"weights {i}") for i in range(NUM_LAYERS)]
    kv = [arena.reserve((per_layer + kv_chunks) * setup.chunk_bytes, f"kv {i}") for i in range(NUM_LAYERS)]
    map_all(arena, weights, per_layer, setup.is_scattered)
    map_all(arena, kv, kv_chunks, setup.is_scattered)
    for region in (*weights, *kv):
        touch(region, *region.mapped[0])
    half = NUM_LAYERS // 2
    tail = (kv_chunks, kv_chunks + per_layer)
    moved_bytes = half * per_layer * setup.chunk_bytes
    figures = Figures(
        moved_bytes=moved_bytes, page_bytes=backend.page_bytes, populates=backend.populates, open_s=opened_s
    )

    def drop() -> None:
        for dropped, grown in zip(weights[:half], kv[half:], strict=True):
            arena.move(dropped, (0, per_layer), grown, kv_chunks)

    def restore() -> None:
        for dropped, grown in zip(weights[:half], kv[half:], strict=True):
            arena.move(grown, tail, dropped, 0)

    def touch_tails() -> None:
        for region in kv[half:]:
            touch(region, *tail)

    for round_ in range(num_rounds + 1):
        before = arena.counters
        times = [seconds(act) for act in (drop, touch_tails, touch_tails)]
        figures.calls = arena.counters - before
        times.append(seconds(restore))
        for region in weights[:half]:
            touch(region, 0, per_layer)
        if round_:
            lists = (figures.drop_s, figures.first_touch_s, figures.second_touch_s, figures.restore_s)
            for values, value in zip(lists, times, strict=True):
                values.append(value)
    if arena.check():
        raise SystemExit(f"the arena lost count: {arena.check()}")
    arena.close()
    return figures


def map_all(arena: Arena, regions: list[Region], num_chunks: int, is_scattered: bool) -> None:
    """Maps the first `num_chunks` of each region, chunk by chunk in turn where they should not lie together."""
    if not is_scattered:
        for region in regions:
            arena.map(region, 0, num_chunks)
        return
    for chunk in range(num_chunks):
        for region in regions:
            arena.map(region, chunk, chunk + 1)


def touch(region: Region, first: int, stop: int) -> None:
    """Writes a byte of every page of these chunks."""
    pages = region.tensor(torch.uint8).view(region.num_chunks, -1)[first:stop].view(-1, SMALL_PAGE_BYTES)
    pages[:, 0].add_(1)


def seconds(act: Callable[[], object]) -> float:
    """How long `act` takes."""
    start_s = time.perf_counter()
    act()
    return time.perf_counter() - start_s


def baselines(num_bytes: int, num_rounds: int) -> dict[str, list[float]]:
    """What the same memory costs without remapping: to copy it, or to have it new."""
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8).fill_(1) for _ in range(2))
    copies = [seconds(lambda: target.copy_(source)) for _ in range(num_rounds)]
    touches = []
    for _ in range(num_rounds):
        fresh = torch.empty(num_bytes, dtype=torch.uint8).view(-1, SMALL_PAGE_BYTES)
        touches.append(seconds(lambda pages=fresh: pages[:, 0].fill_(1)))
        del fresh
    size = format_bytes(num_bytes)
    return {f"copy {size}": copies, f"touch {size} of new memory": touches}


def report(results: dict[Setup, Figures], plain: dict[str, list[float]], arena_bytes: int, load: float) -> str:
    """The tables, as Markdown. `load` is the machine's load average before the run."""
    chosen = Setup(chunk_bytes=2 * MIB)
    lines = [
        "# What a remap costs on a CPU",
        "",
        f"`make bench-arena` on {date.today()}: {_processor()}, {os.cpu_count()} cores, Linux {platform.release()},",
        f"Python {platform.python_version()}, torch {torch.__version__}, one thread. An arena of"
        f" {format_bytes(arena_bytes)}, two thirds",
        f"of it weights of {NUM_LAYERS} layers; those of half the layers go to the KV tails of the others (drop) and",
        "back (restore), through `Arena.move`. Milliseconds, median / most. Load average before the run, from other",
        f"work: {load:.1f}. Where that is above the number of cores, the most holds others' time slices, 4 ms each.",
        "",
    ]
    if chosen in results:
        most_ms = 1e3 * max(results[chosen].drop_s + results[chosen].restore_s)
        verdict = "within" if most_ms <= LIMIT_MS else "NOT within"
        lines += [
            f"Half the layers, {format_bytes(results[chosen].moved_bytes)}, in chunks of"
            f" {format_bytes(chosen.chunk_bytes)}: at most {most_ms:.2f} ms, {verdict} {LIMIT_MS:.0f} ms.",
            "",
        ]
    lines += [
        "## By kind of page, filling of page tables, and chunk size",
        "",
        f'The first {len(CHUNKS)} rows are what the arena does, if the system has huge pages. "Touch" writes a',
        'byte per 4 KiB of what was moved. "Open" makes all pages of the arena.',
        "",
        "| pages | tables filled | chunk | moved | map, unmap calls | drop | restore | first touch | second | open |",
        "|---" * 10 + "|",
    ]
    lines += [_row(setup, figures) for setup, figures in results.items() if not setup.is_scattered]
    lines += ["", "## Where no two chunks of a layer lie together", ""]
    lines += ["| pages | chunk | map, unmap calls | drop | restore |", "|---" * 5 + "|"]
    for setup, figures in results.items():
        if setup.is_scattered:
            sizes = map(format_bytes, (figures.page_bytes, setup.chunk_bytes))
            lines.append(_line(*sizes, _calls(figures), _ms(figures.drop_s), _ms(figures.restore_s)))
    lines += ["", "## Without remapping", "", "| way | ms |", "|---|---|"]
    lines += [_line(way, _ms(values)) for way, values in plain.items()]
    return "\n".join(lines) + "\n"


def _row(setup: Setup, figures: Figures) -> str:
    return _line(
        format_bytes(figures.page_bytes),
        "at once" if figures.populates else "as touched",
        format_bytes(setup.chunk_bytes),
        format_bytes(figures.moved_bytes),
        _calls(figures),
        *map(_ms, (figures.drop_s, figures.restore_s, figures.first_touch_s, figures.second_touch_s)),
        f"{1e3 * figures.open_s:.0f}",
    )


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _calls(figures: Figures) -> str:
    return f"{figures.calls.map_calls}, {figures.calls.unmap_calls}"


def _ms(values: list[float]) -> str:
    return f"{1e3 * statistics.median(values):.2f} / {1e3 * max(values):.2f}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
