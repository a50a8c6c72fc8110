"""Calibrates the load, then runs it on every system of every round."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from benchmarks.figures import complete, percentile, silence_s, tpots_s, ttfts_s
from benchmarks.harness import Stolen
from benchmarks.overload import timeline
from benchmarks.overload.calibrate import Size, all_answered, calibrate, rehearse
from benchmarks.overload.compute import calibrate_compute
from benchmarks.overload.load import Course, Phase, Plan, with_tokens
from benchmarks.overload.profiles import profile
from benchmarks.overload.record import SIMULATED, Record, records
from benchmarks.overload.systems import PengServe, Served, System, Vllm
from benchmarks.overload.timeline import Timeline

T = TypeVar("T")
SYSTEMS = ("vllm-dp", "vllm-pp", "dp", "pp", "drop")
"""vLLM's servers, data and pipeline parallel; PengServe pinned to dp, pinned to a pipeline, and with drops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load, in one round, on one system. Latencies in seconds, shares are of what dp holds."""

    system: str
    num_instances: int
    round_index: int
    num_requests: int
    burst_requests: int  # that each burst adds
    failed: int
    first_error: str
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    burst_ttft_p99_s: float  # of the requests that the burst adds
    tpot_p50_s: float
    tpot_p99_s: float
    gap_p99_s: float  # of the longest time between two texts of an answer
    preemptions: int
    switch_errors: tuple[str, ...]  # why each switch that failed did
    demand_mean: float  # while the load was sent
    demand_peak: float
    stolen: float  # share of the cores' time that the host of this machine gave to others
    timeline: Timeline
    requests: tuple[Record, ...] = ()
    levels: tuple[tuple[tuple[Record, ...], ...], ...] = ()  # `measure_levels` just before it and just after it
    silence_s: float = 0.0  # the longest of a server that had requests; 0 also in results from before 2026-11-25


def measure(
    plan: Plan,
    num_instances: int,
    systems: Sequence[str],
    logs: Path,
    on_size: Callable[[Plan, Size], None],
    on_run: Callable[[Run], None],
) -> tuple[Plan, Size, list[Run]]:
    """Runs all rounds of a size; `on_size` hears of the load of each. The plan is one of this size: see `calibrate`.

    Another system begins each round: so drifts of the machine meet all of them.
    """
    with PengServe(plan, num_instances) as cluster:
        measured = calibrate_compute if plan.is_compute_bound else calibrate
        plan, size = measured(plan, num_instances, cluster)
    if plan.has_profiles:
        found = [profile(plan, system, num_instances, size.weight_bytes) for system in ("vllm", "pengserve")]
        size = replace(size, profiles=tuple(found))
    runs = []
    for round_index in range(plan.rounds):
        if plan.rehearsals:
            with started(plan, size, ["vllm-dp"], logs) as system:
                size = rehearse(plan, size, system)
        on_size(plan, size)
        for names in _in_turn(systems, round_index):
            with started(plan, size, names, logs) as system:
                for name in names:
                    runs.append(run(plan, size, name, round_index, system))
                    on_run(runs[-1])
    return plan, size, runs


@contextmanager
def started(plan: Plan, size: Size, names: Sequence[str], logs: Path) -> Iterator[System]:
    """The servers of these systems, which share them."""
    system: System = PengServe(plan, size.num_instances)
    if names[0].startswith("vllm"):
        num_stages = plan.stages if names[0] == "vllm-pp" else 1
        system = Vllm(plan, size.num_instances, num_stages=num_stages, weight_bytes=size.weight_bytes, logs=logs)
    with system:
        yield system


def measure_levels(plan: Plan, size: Size, name: str, system: System, when: str) -> tuple[tuple[Record, ...], ...]:
    """How fast the machine is then: few and many requests at once, each time none after them.

    And many in pipelines where `name` may form some.
    """
    found = []
    few, full = size.calibration.few.in_flight, size.calibration.full.in_flight
    for layout, in_flight in (("dp", few), ("dp", full), ("pp", full))[: 3 if name == "drop" else 2]:
        requests = plan.calibration(in_flight, f"{name}/{when}/{layout}/{in_flight}")
        served = system.serve(layout, with_tokens([(Phase.LOW, r) for r in requests], size.tokens_per_word(plan)))
        found.append(records(all_answered(served.answers), served.start_s))
    return tuple(found)


def run(plan: Plan, size: Size, name: str, round_index: int, system: System) -> Run:
    """One load on one system."""
    calibration, course = size.calibration, size.course
    pairs = plan.requests(size.num_instances, course, name, round_index)
    levels = []
    if is_simulated := plan.has_profiles and name in SIMULATED:
        levels.append(measure_levels(plan, size, name, system, "before"))
    clock = Stolen()
    served = system.serve(name, with_tokens(pairs, size.tokens_per_word(plan)))
    stolen = clock.share()
    line = make_timeline(served, course, system, int(plan.engine["block_size"]))
    if is_simulated:
        levels.append(measure_levels(plan, size, name, system, "after"))
    good = complete(served.answers)
    bad = [answer for answer in served.answers if answer.error]
    in_burst = [a for (phase, _), a in zip(pairs, served.answers, strict=True) if phase is Phase.BURST]
    ttft_s, tpot_s = ttfts_s(good), tpots_s(good)
    requests = records(served.answers, served.start_s)
    return Run(
        system=name,
        num_instances=size.num_instances,
        round_index=round_index,
        num_requests=len(pairs),
        burst_requests=course.burst_requests,
        failed=len(bad),
        first_error=bad[0].error if bad else "",
        ttft_p50_s=percentile(ttft_s, 50),
        ttft_p90_s=percentile(ttft_s, 90),
        ttft_p99_s=percentile(ttft_s, 99),
        burst_ttft_p99_s=percentile(ttfts_s(in_burst), 99),
        tpot_p50_s=percentile(tpot_s, 50),
        tpot_p99_s=percentile(tpot_s, 99),
        gap_p99_s=percentile([record.longest_gap_s for record in requests], 99),
        preemptions=served.preemptions,
        switch_errors=served.switch_errors,
        demand_mean=timeline.mean_until(line.demand, course.end_s) / calibration.dp_tokens,
        demand_peak=max(line.demand, default=0.0) / calibration.dp_tokens,
        stolen=stolen,
        timeline=line,
        requests=requests,
        levels=tuple(levels),
        silence_s=silence_s(served.answers),
    )


def make_timeline(served: Served, course: Course, system: System, block_size: int) -> Timeline:
    """The run over time."""
    start_s = served.start_s
    end_s = max([course.end_s, *(a.event_times_s[-1] - start_s for a in complete(served.answers))])
    return Timeline(
        end_s=end_s,
        bursts=course.bursts,
        demand=timeline.demand(served.answers, start_s, start_s + end_s, block_size),
        capacity=timeline.capacity(served.layouts, system.tokens_of),
        drops=timeline.drop_periods(served.layouts, end_s),
        ttft=tuple((a.sent_s - start_s, a.first_text_s - a.sent_s) for a in complete(served.answers)),
    )


def _in_turn(systems: Sequence[str], turn: int) -> list[list[str]]:
    """What is started one after the other: PengServe's systems share a cluster. Another one begins each turn."""
    ours = [name for name in systems if not name.startswith("vllm")]
    parts = [ours, *([name] for name in systems if name.startswith("vllm"))]
    return _turned([_turned(part, turn) for part in parts if part], turn)


def _turned(values: list[T], turn: int) -> list[T]:
    """The same in turn."""
    first = turn % len(values)
    return values[first:] + values[:first]
