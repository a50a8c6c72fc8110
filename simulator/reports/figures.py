"""The figures of one run, from its `Result` alone. Pure: the same result gives the same figures.

Percentiles are linear between ranks, as numpy's. A figure of nothing is None, never zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pengserve.simulator.reports.layouts import LayoutSpan, Period, drop_periods, intervals, layout_spans
from pengserve.simulator.reports.slo import SloBase, SloPoint, attainment
from pengserve.simulator.requests import Outcome
from pengserve.simulator.result import Gaps, Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How values of one kind are spread. Seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    p999: float
    maximum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTime:
    """How long the cluster stood in layouts of one kind."""

    layout: str  # counts of shapes: "1 pp4 + 4 dp"
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Everything that reports print of a run."""

    name: str
    policy: str
    num_instances: int
    end_s: float
    num_requests: int
    num_finished: int
    num_refused: int
    num_unfinished: int  # neither finished nor refused when the run ended
    ttft_s: Spread | None
    tpot_s: Spread | None
    tbt_s: Spread | None  # between two tokens of a stream; from a histogram, so to about the width of its bins
    queue_s: Spread | None  # from arrival to the first step
    e2e_s: Spread | None  # from arrival to the last token
    longest_gap_s: Spread | None  # of each finished request with two tokens or more, its longest wait for the next
    requests_per_s: float  # finished ones, over the whole run
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompts of what got a first token, and all that was generated
    slo_base: SloBase | None
    slo: tuple[SloPoint, ...]
    tbt_attained: float | None  # share of tokens within the TBT SLO of their requests; None: none had one
    tbt_attained_paced: float | None  # the same, where clients are sent what came early one token an SLO interval
    num_preemptions: int
    num_moves: int
    cached_share: float | None  # of all prompt tokens that began, found in prefix caches
    kv_use_mean: float | None  # share of the KV room that running requests hold, over time
    kv_use_peak: float | None
    demand_peak: float | None  # KV that all requests in flight would hold, over the room there was at that moment
    shape_shares: tuple[tuple[str, float], ...]  # share of instance-seconds in each shape
    layouts: tuple[LayoutTime, ...]  # the longest first
    drops: tuple[Period, ...]
    num_switches: int  # changes of the layout


def figures_of(result: Result, base: SloBase | None = None) -> Figures:
    """The figures of `result`; SLO attainment where there is a `base` to scale."""
    outcomes = result.outcomes
    finished = [outcome for outcome in outcomes if outcome.end_s is not None]
    generated = sum(outcome.output_tokens for outcome in outcomes)
    prompts = sum(outcome.prompt_tokens for outcome in outcomes if outcome.first_token_s is not None)
    num_refused = sum(bool(outcome.refused) for outcome in outcomes)
    use_mean, use_peak, demand_peak = _memory(result)
    spans = layout_spans(result)
    return Figures(
        name=result.name,
        policy=result.policy,
        num_instances=result.num_instances,
        end_s=result.end_s,
        num_requests=len(outcomes),
        num_finished=len(finished),
        num_refused=num_refused,
        num_unfinished=len(outcomes) - len(finished) - num_refused,
        ttft_s=spread([o.ttft_s for o in outcomes if o.ttft_s is not None]),
        tpot_s=spread([o.tpot_s for o in outcomes if o.tpot_s is not None]),
        tbt_s=gaps_spread(result.gaps),
        queue_s=spread([o.scheduled_s - o.arrived_s for o in outcomes if o.scheduled_s is not None]),
        e2e_s=spread([o.end_s - o.arrived_s for o in finished if o.end_s is not None]),
        longest_gap_s=spread([o.longest_gap_s for o in finished if o.longest_gap_s > 0]),
        requests_per_s=_rate(len(finished), result.end_s),
        output_tokens_per_s=_rate(generated, result.end_s),
        total_tokens_per_s=_rate(generated + prompts, result.end_s),
        slo_base=base,
        slo=attainment(outcomes, base, result.end_s, gaps=result.gaps) if base is not None else (),
        tbt_attained=_tbt_attained(result, lambda outcome: outcome.num_late),
        tbt_attained_paced=_tbt_attained(result, lambda outcome: outcome.num_late_paced),
        num_preemptions=sum(o.num_preemptions for o in outcomes),
        num_moves=sum(o.num_moves for o in outcomes),
        cached_share=sum(o.cached_tokens for o in outcomes) / prompts if prompts else None,
        kv_use_mean=use_mean,
        kv_use_peak=use_peak,
        demand_peak=demand_peak,
        shape_shares=_shape_shares(spans),
        layouts=_layouts(spans),
        drops=drop_periods(spans),
        num_switches=max(0, len(spans) - 1),
    )


def base_of(results: Sequence[Result]) -> SloBase | None:
    """What SLOs are scaled from: the limits that the first run's configuration gives, or the best baseline's P50.

    The best baseline is the lowest P50 among the runs that are not PengServe's, or among all where there is no other
    (KunServe section 5.2). None where nothing was served.
    """
    given = _given_base(results[0].config) if results else None
    if given is not None:
        return given
    others = [result for result in results if result.policy != "pengserve"] or list(results)
    ttfts = [found.p50 for result in others if (found := spread(_ttfts(result.outcomes))) is not None]
    tpots = [found.p50 for result in others if (found := spread(_tpots(result.outcomes))) is not None]
    if not ttfts:
        return None
    what = "the P50 of this run" if len(results) == 1 else "the lowest P50 of a baseline"
    tbts = [found.p50 for result in others if (found := gaps_spread(result.gaps)) is not None]
    return SloBase(ttft_s=min(ttfts), tpot_s=min(tpots, default=None), tbt_s=min(tbts, default=None), source=what)


def spread(values: Sequence[float]) -> Spread | None:
    """Mean, percentiles and the largest of `values`; None where there are none."""
    if not values:
        return None
    data = np.asarray(values, dtype=float)
    p50, p90, p99, p999 = (float(value) for value in np.percentile(data, (50, 90, 99, 99.9)))
    return Spread(
        count=len(values), mean=float(data.mean()), p50=p50, p90=p90, p99=p99, p999=p999, maximum=float(data.max())
    )


def gaps_spread(gaps: Gaps) -> Spread | None:
    """The same of a histogram. Inside a bin gaps count as spread evenly over the logarithm, where its edges allow."""
    total = sum(gaps.counts)
    if not total:
        return None
    edges, counts = gaps.edges_s, gaps.counts
    middles = [_between(edges[i], edges[i + 1], 0.5) for i in range(len(counts))]
    p50, p90, p99, p999 = (_gap_at(gaps, total * share) for share in (0.5, 0.9, 0.99, 0.999))
    return Spread(
        count=total,
        mean=sum(middle * count for middle, count in zip(middles, counts, strict=True)) / total,
        p50=p50,
        p90=p90,
        p99=p99,
        p999=p999,
        maximum=edges[max(i for i, count in enumerate(counts) if count) + 1],
    )


def gap_at(gaps: Gaps, share: float) -> float | None:
    """The gap that this share of them are not above; None where there is none."""
    total = sum(gaps.counts)
    return _gap_at(gaps, share * total) if total else None


def _gap_at(gaps: Gaps, rank: float) -> float:
    """The gap that `rank` gaps are not above."""
    before = 0
    for index, count in enumerate(gaps.counts):
        if count and before + count >= rank:
            return _between(gaps.edges_s[index], gaps.edges_s[index + 1], (rank - before) / count)
        before += count
    return gaps.edges_s[-1]


def _between(low: float, high: float, share: float) -> float:
    if low <= 0 or high == float("inf"):
        return low if high == float("inf") else low + share * (high - low)
    return float(low * (high / low) ** share)


def _ttfts(outcomes: Sequence[Outcome]) -> list[float]:
    return [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]


def _tpots(outcomes: Sequence[Outcome]) -> list[float]:
    return [outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None]


def _given_base(config: dict[str, object]) -> SloBase | None:
    slo = config.get("slo")
    if not isinstance(slo, dict):
        return None
    names = ("ttft_s", "tpot_s", "tbt_s")
    ttft_s, tpot_s, tbt_s = (None if slo.get(name) is None else float(slo[name]) for name in names)
    if ttft_s is None and tpot_s is None and tbt_s is None:
        return None
    return SloBase(ttft_s=ttft_s, tpot_s=tpot_s, tbt_s=tbt_s, source="the configuration")


def _tbt_attained(result: Result, late: Callable[[Outcome], int]) -> float | None:
    slo = result.config.get("slo")
    if not isinstance(slo, dict) or slo.get("tbt_s") is None:
        return None
    num_gaps = sum(max(0, outcome.output_tokens - 1) for outcome in result.outcomes)
    return 1.0 - sum(late(outcome) for outcome in result.outcomes) / num_gaps if num_gaps else None


def _memory(result: Result) -> tuple[float | None, float | None, float | None]:
    """Mean and peak use of the KV room, and peak demand over it; None where the room is not known."""
    weighted = total_s = use_peak = demand_peak = 0.0
    known = False
    for start_s, stop_s, moment in intervals(result):
        if not moment.held_tokens:
            continue
        known = True
        use = moment.used_tokens / moment.held_tokens
        weighted += use * (stop_s - start_s)
        total_s += stop_s - start_s
        use_peak = max(use_peak, use)
        demand_peak = max(demand_peak, moment.demand_tokens / moment.held_tokens)
    return (weighted / total_s if total_s else use_peak, use_peak, demand_peak) if known else (None, None, None)


def _shape_shares(spans: Sequence[LayoutSpan]) -> tuple[tuple[str, float], ...]:
    seconds: dict[str, float] = {}
    for span in spans:
        for group in span.groups:
            seconds[group.shape] = seconds.get(group.shape, 0.0) + group.degree * (span.stop_s - span.start_s)
    total = sum(seconds.values())
    return tuple((shape, value / total) for shape, value in sorted(seconds.items())) if total else ()


def _layouts(spans: Sequence[LayoutSpan]) -> tuple[LayoutTime, ...]:
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.words] = seconds.get(span.words, 0.0) + span.stop_s - span.start_s
    longest_first = sorted(seconds.items(), key=lambda pair: (-pair[1], pair[0]))
    return tuple(LayoutTime(layout=layout, seconds=value) for layout, value in longest_first)


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
