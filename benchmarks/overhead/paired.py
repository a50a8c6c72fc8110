"""What a change costs a user who uses none of it: `python -m benchmarks.overhead.paired CHECKOUT`.

PengServe of this checkout and of another, with its own `.venv`, are up at the same time. Bursts of requests go to one
and to the other in turn, so that both are measured in the same minute; each pair of bursts has the same prompts. A
ratio is this checkout's figure over the other's. Steps of vLLM's schedulers are counted too: more steps for the same
tokens mean smaller batches. The time of a step is the median gap between two tokens of a stream.
"""

import argparse
import asyncio
import re
import statistics
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.harness import has_model, option_parser, progress_bar, tell_written, today
from benchmarks.overhead.load import Figures, run_level
from benchmarks.overhead.plan import Level, Plan
from benchmarks.overhead.systems.base import StartError
from benchmarks.overhead.systems.pengserve import PengServeUp
from benchmarks.result_files import facts_line, plan_data, table, write_result

BURSTS = (
    Level(num_clients=1, num_requests=16),
    Level(num_clients=8, num_requests=96),
    Level(num_clients=32, num_requests=192),
)
STEPS = re.compile(r"^vllm:iteration_tokens_total_count\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """One burst on one of the two."""

    is_this: bool
    index: int
    num_steps: float  # of all instances
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """This checkout over the other, of paired bursts."""

    mean: float
    error: float  # standard error of the mean

    @classmethod
    def of(cls, pairs: list[tuple[float, float]]) -> "Ratio":
        """Of (the other's, ours)."""
        found = [ours / theirs for theirs, ours in pairs]
        error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else float("nan")
        return cls(mean=statistics.mean(found), error=error)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}"


def main() -> int:
    """Runs the bursts, prints the ratios, writes the result; the exit code."""
    options, console = _options(), Console(stderr=True)
    plan = Plan(model=options.model.resolve(), rounds=options.rounds, levels=BURSTS)
    if not has_model(plan.model, console):
        return 2
    settings = {"shape": {"degrees": [2], "auto": False}} if options.shapes else {}
    logs = Path(tempfile.mkdtemp(prefix="pengserve-bench-"))
    other = PengServeUp(logs / "other", command=options.checkout / ".venv/bin/pengserve", settings=settings)
    this = PengServeUp(logs / "this", settings=settings)
    try:
        urls = {False: other.start(plan), True: this.start(plan)}
        bursts = _measure(plan, urls, console)
    except StartError as error:
        console.print(f"no server: {error}", highlight=False, markup=False)
        return 1
    finally:
        this.stop()
        other.stop()
    rows = [
        _row(level, [burst for burst in bursts if burst.figures.num_clients == level.num_clients]) for level in BURSTS
    ]
    headings = [
        "clients",
        "bursts",
        "tokens/s, the other",
        "tokens/s, this",
        "ratio ± standard error",
        "processor time",
        "steps",
        "a step's time",
    ]
    subject = "# Two checkouts, in turn" + (", instances that may form groups" if options.shapes else "")
    text = "\n".join([subject, "", facts_line(), "", *table(headings, rows), ""])
    print(text)
    name = "paired-shapes" if options.shapes else "paired"
    record = {"plan": plan_data(plan), "shapes": options.shapes, "bursts": bursts_data(bursts)}
    tell_written(console, write_result(options.output, name, today(), record, text))
    return 0


def _measure(plan: Plan, urls: dict[bool, list[str]], console: Console) -> list[Burst]:
    for is_this in (False, True):
        _burst(plan, urls[is_this], -1, Level(num_clients=8, num_requests=48))
    bursts = []
    with progress_bar(console) as progress:
        task = progress.add_task("pairs of bursts", total=plan.rounds * len(plan.levels))
        for index in range(plan.rounds):
            for level in plan.levels:
                for is_this in (False, True) if index % 2 else (True, False):
                    figures, num_steps = _burst(plan, urls[is_this], index, level)
                    bursts.append(Burst(is_this=is_this, index=index, num_steps=num_steps, figures=figures))
                progress.advance(task)
    return bursts


def _burst(plan: Plan, urls: list[str], index: int, level: Level) -> tuple[Figures, float]:
    before = _steps(urls[0])
    figures = asyncio.run(run_level(plan, urls, plan.prompts(index, level), level.num_clients))
    if figures.failed:
        raise StartError(f"{figures.failed} requests failed: {figures.first_error}")
    return figures, _steps(urls[0]) - before


def _steps(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return sum(float(count) for count in STEPS.findall(answer.read().decode()))


def bursts_data(bursts: list[Burst]) -> list[dict[str, float]]:
    """Rows of plain values, for the record."""
    return [
        {
            "is_this": burst.is_this,
            "index": burst.index,
            "num_clients": burst.figures.num_clients,
            "tokens_per_s": burst.figures.tokens_per_s,
            "cpu_s": burst.figures.machine_cpu_s,
            "num_steps": burst.num_steps,
            "gap_s": burst.figures.itl_p50_s,
        }
        for burst in bursts
    ]


def _row(level: Level, bursts: list[Burst]) -> list[str]:
    theirs = [burst for burst in bursts if not burst.is_this]
    ours = [burst for burst in bursts if burst.is_this]
    speed, cpu, steps, gap = (
        Ratio.of([(figure(one), figure(other)) for one, other in zip(theirs, ours, strict=True)])
        for figure in (
            lambda burst: burst.figures.tokens_per_s,
            lambda burst: burst.figures.machine_cpu_s,
            lambda burst: burst.num_steps,
            lambda burst: burst.figures.itl_p50_s,
        )
    )
    middle = [statistics.median(burst.figures.tokens_per_s for burst in side) for side in (theirs, ours)]
    return [
        str(level.num_clients),
        str(len(ours)),
        *(f"{value:.0f}" for value in middle),
        str(speed),
        str(cpu),
        str(steps),
        str(gap),
    ]


def _options() -> argparse.Namespace:
    parser = option_parser("overhead.paired", __doc__)
    parser.add_argument("checkout", type=Path, help="folder of the other checkout, set up by `make setup`")
    parser.add_argument("--rounds", type=int, default=12, help="pairs of bursts at each level (about 20 s each)")
    parser.add_argument("--shapes", action="store_true", help="both with shape.degrees [2] and shape.auto false")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
