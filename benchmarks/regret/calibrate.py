"""What dp serves of each trace, and what counts as served in time: measured once, and written to `calibrated.yaml`.

Requests per second that dp serves: as many requests as make some millions of tokens come all at once, and until those
that have ended hold four fifths of all tokens, that many tokens a second are served. The rest is left out: at the end
instances run empty.

Limits: `SLO_SCALE` times the mean TTFT and TPOT that dp has at half of that load, as KunServe (5.2) takes five times
what a baseline has in its workload. Prefixes are left out of both: what is cached would depend on the dispatch.
"""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import accumulate, cycle, islice
from pathlib import Path

import yaml

from benchmarks.regret.cases import (
    CALIBRATED,
    SEED,
    SLO_SCALE,
    STATIC,
    Case,
    clipped,
    config_of,
    machines,
    span_of,
    traces_of,
)
from pengserve.simulator.reports.figures import spread
from pengserve.simulator.requests import Arrival
from pengserve.simulator.run import simulate
from pengserve.simulator.traces.upscale import upscale

HALF = 0.5
SERVED = 0.8  # share of all tokens
TOKENS, LEAST, MOST = 4_000_000, 400, 2_000  # of a calibration: tokens, and the bounds of the number of requests


def calibrate(folder: Path, on_done: Callable[[str], None]) -> Path:
    """Measures all machines and traces, and writes them; the file's path.

    Raises:
        ConfigError: a trace cannot be read.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for machine in machines():
        rows = found[machine] = {}
        for trace in traces_of(machine):
            case = Case(machine=machine, trace=trace, scale=1.0)
            arrivals = tuple(
                dataclasses.replace(arrival, prefix_ids=(), prefix_block=0)
                for arrival in clipped(machine, trace, folder)
            )
            rate = dp_rate(case, arrivals)
            ttft_s, tpot_s = half_latencies(case, _half(arrivals, rate, trace, folder))
            rows[trace] = {
                "requests_per_s": _rounded(rate),
                "ttft_s": _rounded(SLO_SCALE * ttft_s),
                "tpot_s": _rounded(SLO_SCALE * tpot_s),
            }
            on_done(f"{machine}/{trace}: {rows[trace]}")
    head = "# Written by `python -m benchmarks.regret --calibrate`; calibrate.py says how these are measured.\n"
    CALIBRATED.write_text(head + yaml.safe_dump(found, sort_keys=False), encoding="utf-8")
    return CALIBRATED


def dp_rate(case: Case, arrivals: Sequence[Arrival]) -> float:
    """Requests per second that dp serves of these."""
    mean_tokens = sum(_tokens(arrival) for arrival in arrivals) / len(arrivals)
    count = min(MOST, max(LEAST, round(TOKENS / mean_tokens)))
    requests = tuple(
        dataclasses.replace(arrival, request_id=f"{number}", at_s=0.0)
        for number, arrival in enumerate(islice(cycle(arrivals), count))
    )
    result = simulate(config_of(case, STATIC[0], requests), requests)
    ended = sorted(
        (outcome.end_s, outcome.prompt_tokens + outcome.output_tokens) for outcome in result.outcomes if outcome.end_s
    )
    total = sum(tokens for _, tokens in ended)
    sums = accumulate(tokens for _, tokens in ended)
    at_s = next(end_s for (end_s, _), tokens in zip(ended, sums, strict=True) if tokens >= SERVED * total)
    return SERVED * total / at_s / (total / len(ended))


def half_latencies(case: Case, arrivals: tuple[Arrival, ...]) -> tuple[float, float]:
    """The mean TTFT and TPOT on dp."""
    outcomes = simulate(config_of(case, STATIC[0], arrivals), arrivals).outcomes
    ttft_s = spread([outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None])
    tpot_s = spread([outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None])
    assert ttft_s is not None and tpot_s is not None, "dp serves half of what it can"
    return ttft_s.mean, tpot_s.mean


def _half(arrivals: Sequence[Arrival], rate: float, trace: str, folder: Path) -> tuple[Arrival, ...]:
    """The trace at half of dp's rate."""
    return upscale(arrivals, HALF * rate * span_of(trace, folder) / len(arrivals), SEED)


def _tokens(arrival: Arrival) -> int:
    return arrival.prompt_tokens + arrival.output_tokens


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
