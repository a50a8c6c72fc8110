"""What a host tier costs instances that do not need it, in each shape: `python -m benchmarks.tiers.unused`.

Two clusters of two instances are up at the same time, one of them with host tiers. Bursts that fit the devices go to
one and to the other in turn, a second each. The time of a step is the median gap between two texts of a stream;
processor time is that of the instances. Fresh starts of the same code differ by more than the bursts of one start, so
there are several; with `--layouts tp2 --starts 10 --pairs 10` ten of one shape take a quarter of an hour.
"""

import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.client import Client, Request
from benchmarks.figures import complete, gaps_s, percentile
from benchmarks.harness import (
    MIB,
    engine_flags,
    has_model,
    option_parser,
    progress_bar,
    tell_written,
    text,
    today,
)
from benchmarks.ingress import settled_ingress
from benchmarks.result_files import facts_line, plan_data, table, write_result
from pengserve.controller.process_port import HOST_COMMAND
from pengserve.planners.types.config import DropConfig
from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.ingress import MODEL_NAME

LAYOUTS = ("dp", "tp2", "pp2")
LIMIT = 1.02  # of a step's time
COUNTERS = ("total_staged_bytes", "total_brought_bytes", "total_evicted_bytes", "total_parked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One benchmark run."""

    model: Path
    starts: int  # of both clusters
    pairs: int  # of bursts, in each layout of a start
    layouts: Sequence[str] = LAYOUTS
    requests: int = 8  # of a burst, all at once
    words: int = 80
    output_tokens: int = 60
    memory_bytes: int = 256 * MIB  # of an instance, for weights and KV
    host_bytes: int = 128 * MIB
    seed: int = 23
    engine: Mapping[str, Any] = field(default_factory=partial(engine_flags, max_num_seqs=16))

    def burst(self, index: int) -> list[Request]:
        """The same for both clusters."""
        source = random.Random(f"{self.seed}/{index}")
        return [Request(prompt=text(source, self.words), max_tokens=self.output_tokens) for _ in range(self.requests)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """A burst on one of the two."""

    start: int
    layout: str
    index: int
    has_host_tier: bool
    cpu_s: float  # of all instances
    gap_s: float  # median between two texts
    tokens_per_s: float


class _Bench:
    """One cluster with its client."""

    def __init__(self, plan: Plan, cluster: ElasticCluster, client: Client, *, has_host_tier: bool) -> None:
        self._plan, self._has_host_tier = plan, has_host_tier
        self.cluster, self._client = cluster, client

    def run(self, start: int, layout: str, index: int) -> Burst:
        """Serves a burst."""
        before_s = self._cpu_s()
        answers = self._client.send(self._plan.burst(index)).result()
        good = complete(answers)
        if len(good) < len(answers):
            raise RuntimeError(next(answer.error for answer in answers if answer.error))
        wall_s = max(answer.event_times_s[-1] for answer in good) - min(answer.sent_s for answer in good)
        return Burst(
            start=start,
            layout=layout,
            index=index,
            has_host_tier=self._has_host_tier,
            cpu_s=self._cpu_s() - before_s,
            gap_s=percentile(gaps_s(answers), 50),
            tokens_per_s=sum(answer.output_tokens for answer in good) / wall_s,
        )

    def used(self) -> int:
        """Bytes and requests that went to a host or came from one."""
        stats = [instance.stats for instance in self.cluster.snapshot().instances]
        return int(sum(getattr(each, name) for each in stats for name in COUNTERS))

    def _cpu_s(self) -> float:
        pids = map(self.cluster.pid, range(self.cluster.config.num_instances))
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


@contextmanager
def _bench(plan: Plan, host_bytes: int) -> Iterator[_Bench]:
    with (
        elastic_cluster(
            plan.model,
            2,
            engine=plan.engine,
            drop=DropConfig(is_auto=False),
            max_stages=2,
            memory_bytes=plan.memory_bytes,
            host_bytes=host_bytes,
            host_module=HOST_COMMAND[-1],
        ) as cluster,
        settled_ingress(cluster) as url,
        Client(url, MODEL_NAME) as client,
    ):
        yield _Bench(plan, cluster, client, has_host_tier=host_bytes > 0)


def measure(plan: Plan, on_pair: Callable[[Sequence[Burst]], None]) -> None:
    """All pairs of all layouts of all starts; the other cluster begins each start and each pair."""
    for start in range(plan.starts):
        _measure(plan, start, on_pair)


def _measure(plan: Plan, start: int, on_pair: Callable[[Sequence[Burst]], None]) -> None:
    sizes = (0, plan.host_bytes)
    with ExitStack() as stack:
        benches = [stack.enter_context(_bench(plan, size)) for size in (sizes[::-1] if start % 2 else sizes)]
        for layout in plan.layouts:
            for bench in benches:
                bench.cluster.set_layout(layout)
                bench.run(start, layout, -1)
                bench.run(start, layout, -2)
            for index in range(plan.pairs):
                on_pair([bench.run(start, layout, index) for bench in (benches if index % 2 else benches[::-1])])
        if used := sum(bench.used() for bench in benches):
            raise RuntimeError(f"the host tier was used ({used} bytes or requests): these bursts were to need none")


def ratios(bursts: Sequence[Burst], layout: str, get: Callable[[Burst], float]) -> list[float]:
    """With a host tier over without, of each pair."""
    pairs: dict[tuple[int, int], dict[bool, float]] = {}
    for burst in bursts:
        if burst.layout == layout:
            pairs.setdefault((burst.start, burst.index), {})[burst.has_host_tier] = get(burst)
    return [pair[True] / pair[False] for pair in pairs.values()]


def gap_ratio(bursts: Sequence[Burst], layout: str) -> float:
    """A step's time with an unused host tier over that without one: the median of the pairs."""
    return statistics.median(ratios(bursts, layout, lambda burst: burst.gap_s))


def is_met(bursts: Sequence[Burst]) -> bool:
    """Whether no layout's steps take longer than they may."""
    return all(gap_ratio(bursts, layout) <= LIMIT for layout in {burst.layout for burst in bursts})


def markdown(plan: Plan, bursts: Sequence[Burst], date: str) -> str:
    """The result for readers."""
    rows = []
    for layout in plan.layouts:
        gaps = ratios(bursts, layout, lambda burst: burst.gap_s)
        speeds = ratios(bursts, layout, lambda burst: burst.tokens_per_s)
        work = ratios(bursts, layout, lambda burst: burst.cpu_s)
        without = [burst.gap_s for burst in bursts if burst.layout == layout and not burst.has_host_tier]
        cells = (f"{1e3 * statistics.median(without):.2f}", *map(_of_three, (gaps, work, speeds)))
        rows.append([layout, *cells, "yes" if gap_ratio(bursts, layout) <= LIMIT else "no"])
    heading = ("layout", "a step without, ms", "step", "processor time", "tokens/s", "met")
    lines = [
        "# What an unused host tier costs",
        "",
        f"`python -m benchmarks.tiers.unused` on {date}: {plan.model.name}, two clusters of two instances up at once, "
        f"one with a host tier of {plan.host_bytes // MIB} MiB an instance. {plan.starts} starts with "
        f"{plan.pairs} pairs of bursts in each layout, of {plan.requests} requests, {plan.output_tokens} tokens each. "
        f"A step's time is the median gap between two texts of a stream; processor time is that of both instances. "
        f"Ratios are with a host tier over without: median (quartiles) of the pairs. The limit of a step is {LIMIT}.",
        "",
        facts_line(),
        "",
        *table(heading, rows),
    ]
    return "\n".join(lines) + "\n"


def _of_three(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> int:
    """Measures, prints and writes the table; the exit code says whether the law held."""
    parser = option_parser("tiers.unused", __doc__)
    parser.add_argument("--starts", type=int, default=4, help="fresh starts of both clusters")
    parser.add_argument("--pairs", type=int, default=16, help="pairs of bursts in each layout of a start")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="default: all")
    options, console = parser.parse_args(), Console(stderr=True)
    plan = Plan(
        model=options.model.resolve(), starts=options.starts, pairs=options.pairs, layouts=tuple(options.layouts)
    )
    if not has_model(plan.model, console):
        return 2
    bursts: list[Burst] = []
    with progress_bar(console) as progress:
        task = progress.add_task("pairs of bursts", total=plan.starts * plan.pairs * len(plan.layouts))

        def on_pair(pair: Sequence[Burst]) -> None:
            bursts.extend(pair)
            progress.update(task, advance=1, description=f"start {pair[0].start + 1}, {pair[0].layout}")

        measure(plan, on_pair)
    date = today()
    shown = markdown(plan, bursts, date)
    sys.stdout.write(shown)
    record = {"plan": plan_data(plan), "bursts": [asdict(burst) for burst in bursts]}
    name = "-".join(["tiers-unused", *(plan.layouts if plan.layouts != LAYOUTS else ())])
    tell_written(console, write_result(options.output, name, date, record, shown))
    return 0 if is_met(bursts) else 1


if __name__ == "__main__":
    sys.exit(main())
