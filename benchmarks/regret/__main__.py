"""How much PengServe loses or gains against the best static layout: `python -m benchmarks.regret`.

Each case is a trace at a scale on a machine, in virtual time. Cases that break the law are listed, and the exit code is
0 all the same; `--strict` makes it 1.

    python -m benchmarks.regret                              all cases of the folder of traces
    python -m benchmarks.regret --only azure --only 4090     cases whose names (MACHINE/TRACE/SCALE) hold any of these
    python -m benchmarks.regret --cases 12                   every so-many-th case, 12 in all
    python -m benchmarks.regret --small                      the ten cases that tests run, on generated traces
    python -m benchmarks.regret --policies pengserve merge   these beside the static layouts
    python -m benchmarks.regret --small --seed 11            arrivals on which nothing was tuned
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console

from benchmarks.harness import RESULTS, progress_bar, tell_written, today
from benchmarks.regret import report
from benchmarks.regret.calibrate import calibrate
from benchmarks.regret.cases import (
    SEED,
    STATIC,
    STATIC_LABELS,
    TRACES,
    VARIANTS,
    Case,
    Variant,
    all_cases,
    is_here,
    matching,
    small_cases,
)
from benchmarks.regret.law import best_static, broken
from benchmarks.regret.run import Measured, measure
from pengserve.controller.collector import spare_the_loop

TABLE_WIDTH = 200  # columns; a narrower terminal or a pipe would cut words


def main() -> int:
    """Runs the cases, prints the table, writes the result; the exit code."""
    options = _options()
    console = Console(stderr=True)
    if options.calibrate:
        tell_written(console, [calibrate(options.traces, lambda words: console.print(words, highlight=False))])
        return 0
    cases = _chosen(options)
    absent = sorted({case.trace for case in cases if not is_here(case.trace, options.traces)})
    if absent:
        console.print(f"left out, as {options.traces} does not hold them: {', '.join(absent)}", highlight=False)
    cases = [case for case in cases if case.trace not in absent]
    if not cases:
        console.print("no case is left: give another --only, another --traces, or --small")
        return 2
    found = list(_measured(cases, options, console))
    for row in report.rows(found):
        Console(width=TABLE_WIDTH).print(" | ".join(row), highlight=False, markup=False)
    for line in report.summary(found):
        Console(width=TABLE_WIDTH).print(line, highlight=False, markup=False)
    tell_written(console, report.write(options.output, found, today(), is_small=options.small))
    return 1 if options.strict and any(broken(measured) for measured in found) else 0


def _measured(cases: Sequence[Case], options: argparse.Namespace, console: Console) -> Iterator[Measured]:
    """All cases in their order, in some processes side by side."""
    work = partial(measure, folder=options.traces, variants=_variants(options.policies))
    with progress_bar(console) as progress:
        bar = progress.add_task("cases", total=len(cases))
        with ProcessPoolExecutor(options.processes, get_context("spawn"), initializer=spare_the_loop) as pool:
            for measured in pool.map(work, cases):
                progress.advance(bar)
                best, whole = best_static(measured), measured.row("pengserve")
                words = f"best {best.label} {best.good}" + ("" if whole is None else f", pengserve {whole.good}")
                seconds = sum(row.cpu_s for row in measured.rows)
                console.print(
                    f"{measured.case.name}: {measured.requests} requests, {words} in time; {seconds:.0f} s of a core",
                    highlight=False,
                )
                yield measured


def _chosen(options: argparse.Namespace) -> list[Case]:
    """What the options name, in the order of the file."""
    cases = small_cases() if options.small else all_cases()
    found = [replace(case, seed=options.seed) for case in matching(cases, options.only)]
    if options.cases is not None and options.cases < len(found):
        found = [found[number * len(found) // options.cases] for number in range(options.cases)]
    return found


def _variants(labels: Sequence[str] | None) -> tuple[Variant, ...]:
    if labels is None:
        return VARIANTS
    return (*STATIC, *(variant for variant in VARIANTS if variant.label in labels and variant not in STATIC))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regret", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    others = [variant.label for variant in VARIANTS if variant.label not in STATIC_LABELS]
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="cases whose names hold this")
    parser.add_argument("--cases", type=int, metavar="N", help="so many of them, evenly chosen")
    parser.add_argument("--small", action="store_true", help="the ten cases of the tests")
    parser.add_argument(
        "--seed", type=int, default=SEED, help=f"of arrivals that are drawn; {SEED} is what was tuned on"
    )
    parser.add_argument("--policies", nargs="+", choices=others, help="beside the static layouts; default: all")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the public traces")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="side by side")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a case breaks the law")
    parser.add_argument("--calibrate", action="store_true", help="measure calibrated.yaml anew, and nothing else")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
