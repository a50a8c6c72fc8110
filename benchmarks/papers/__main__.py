"""Headline figures of the papers, simulated: `python -m benchmarks.papers`, from the root of the repository."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.harness import RESULTS, tell_written, today
from benchmarks.papers import report
from benchmarks.papers.scenarios import SCENARIOS, Run, configs, run
from pengserve.simulator.progress import Advance, progress_on

TABLE_WIDTH = 160  # columns; a narrower terminal or a pipe would cut words


def main() -> int:
    """Runs the scenarios under all their policies, prints the ratios, writes the result; the exit code."""
    options = _options()
    console = Console(stderr=True)
    runs: list[Run] = []
    with progress_on(console) as progress:
        for scenario in options.scenarios:
            for label, config in configs(scenario):
                advance = Advance(progress, f"{scenario}: {label}")
                runs.append(run(scenario, label, config, advance))
                advance.done()
                console.print(f"{scenario}: {label} in {runs[-1].cpu_s:.0f} s of one core", highlight=False)
    found = report.figures(runs)
    for row in report.headline_rows(found):
        Console(width=TABLE_WIDTH).print(" | ".join(row), highlight=False, markup=False)
    tell_written(console, report.write(options.output, runs, today(), options.name))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--name", default="papers", help="how the result's files begin, where only some scenarios run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
