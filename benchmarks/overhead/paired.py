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
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.harness import has_model, option_parser, progress_bar, tell_written, today
from benchmarks.overhead.load import Figures, run_level
from benchmarks.overhead.plan import Level, Plan
from benchmarks.overhead.processor_time import processor_time_s
from benchmarks.overhead.systems.base import StartError
from benchmarks.overhead.systems.pengserve import PengServeUp
from benchmarks.result_files import facts_line, plan_data, table, write_result

OTHER, THIS = "other", "this"
SETTLE_S, SETTLED_FOR_S = 90.0, 5.0
IDLE_SHARE = 0.3  # of a core, for one whole system: Ray, Serve and the controller never rest
BURSTS = (
    Level(num_clients=1, num_requests=16),
    Level(num_clients=8, num_requests=96),
    Level(num_clients=32, num_requests=192),
)
STEPS = re.compile(r"^vllm:iteration_tokens_total_count\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """One burst on one of the two."""

    start: int
    is_this: bool
    index: int
    num_steps: float  # of all instances
    cpu_s: float  # of this system's processes
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """This checkout over the other."""

    mean: float
    error: float  # standard error of the mean

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, float, float]]) -> "Ratio":
        """Of paired bursts: (start, the other's, ours). One start alone gives the error of its bursts.

        A pair whose other figure is 0 tells nothing: on a busy machine most events of a burst can come together.
        """
        starts: dict[int, list[float]] = {}
        for start, theirs, ours in pairs:
            if theirs:
                starts.setdefault(start, []).append(ours / theirs)
        if not starts:
            return cls(mean=float("nan"), error=float("nan"))
        found = [statistics.mean(ratios) for ratios in starts.values()]
        if len(found) == 1:
            (found,) = starts.values()
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
    logs, urls = Path(tempfile.mkdtemp(prefix="pengserve-bench-")), dict[str, list[str]]()
    other = PengServeUp(logs / OTHER, name=OTHER, command=options.checkout / ".venv/bin/pengserve", settings=settings)
    this = PengServeUp(logs / THIS, name=THIS, settings=settings)
    bursts = []
    with progress_bar(console) as progress:
        task = progress.add_task("pairs of bursts", total=options.starts * plan.rounds * len(plan.levels))
        for start in range(options.starts):
            try:
                for system in (other, this) if start % 2 else (this, other):
                    urls[system.name] = system.start(plan)
                bursts += _measure(plan, urls, start, lambda: progress.advance(task))
            except StartError as error:
                console.print(f"no server: {error}", highlight=False, markup=False)
                return 1
            finally:
                this.stop()
                other.stop()
    rows = [
        _row(str(level.num_clients), [burst for burst in bursts if burst.figures.num_clients == level.num_clients])
        for level in BURSTS
    ]
    rows.append(_row("all", bursts))
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


def _measure(plan: Plan, urls: Mapping[str, list[str]], start: int, advance: Callable[[], None]) -> list[Burst]:
    for system in (OTHER, THIS):
        _burst(plan, urls, system, start, -1, Level(num_clients=8, num_requests=48))
    _settle()
    bursts = []
    for index in range(plan.rounds):
        for level in plan.levels:
            for system in (OTHER, THIS) if index % 2 else (THIS, OTHER):
                bursts.append(_burst(plan, urls, system, start, index, level))
            advance()
    return bursts


def _settle() -> None:
    """Returns when what both do after their first requests is over: instances time steps while no other comes."""
    give_up_s = time.monotonic() + SETTLE_S
    while time.monotonic() < give_up_s:
        before_s = [processor_time_s(system) for system in (OTHER, THIS)]
        time.sleep(SETTLED_FOR_S)
        after_s = [processor_time_s(system) for system in (OTHER, THIS)]
        if all(b - a < IDLE_SHARE * SETTLED_FOR_S for a, b in zip(before_s, after_s, strict=True)):
            return


def _burst(plan: Plan, urls: Mapping[str, list[str]], system: str, start: int, index: int, level: Level) -> Burst:
    steps, cpu_s = _steps(urls[system][0]), processor_time_s(system)
    prompts = plan.prompts(index, level)
    figures = asyncio.run(run_level(plan, urls[system], prompts, level.num_clients))
    if figures.failed:
        raise StartError(f"{figures.failed} requests failed: {figures.first_error}")
    return Burst(
        start=start,
        is_this=system == THIS,
        index=index,
        num_steps=_steps(urls[system][0]) - steps,
        cpu_s=processor_time_s(system) - cpu_s,
        figures=figures,
    )


def _steps(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return sum(float(count) for count in STEPS.findall(answer.read().decode()))


def bursts_data(bursts: list[Burst]) -> list[dict[str, float]]:
    """Rows of plain values, for the record."""
    return [
        {
            "start": burst.start,
            "is_this": burst.is_this,
            "index": burst.index,
            "num_clients": burst.figures.num_clients,
            "tokens_per_s": burst.figures.tokens_per_s,
            "cpu_s": burst.cpu_s,
            "num_steps": burst.num_steps,
            "gap_s": burst.figures.itl_p50_s,
        }
        for burst in bursts
    ]


def _row(name: str, bursts: list[Burst]) -> list[str]:
    theirs = [burst for burst in bursts if not burst.is_this]
    ours = [burst for burst in bursts if burst.is_this]
    speed, cpu, steps, gap = (
        Ratio.of([(one.start, figure(one), figure(other)) for one, other in zip(theirs, ours, strict=True)])
        for figure in (
            lambda burst: burst.figures.tokens_per_s,
            lambda burst: burst.cpu_s,
            lambda burst: burst.num_steps,
            lambda burst: burst.figures.itl_p50_s,
        )
    )
    middle = [statistics.median(burst.figures.tokens_per_s for burst in side) for side in (theirs, ours)]
    return [
        name,
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
    parser.add_argument("--starts", type=int, default=4, help="fresh starts of both (about 40 s each)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of bursts at each level of a start (20 s each)")
    parser.add_argument("--shapes", action="store_true", help="both with shape.degrees [2] and shape.auto false")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
