"""The figures as rows of words, for pages and terminals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pengserve.simulator.reports import words
from pengserve.simulator.reports.figures import Figures, Spread

HEADLINE_SCALE = 5  # KunServe's scale for chat

Number = float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRow:
    """One figure of each run."""

    part: str  # rows of one part stand together
    title: str  # with its unit, where `show` does not write it
    get: Callable[[Figures], Number]
    show: Callable[[Number], str]

    def cells(self, runs: Sequence[Figures]) -> list[tuple[str, str]]:
        """For each run its value, and its ratio to the first run's (empty for the first)."""
        values = [self.get(figures) for figures in runs]
        return [(self.show(value), words.ratio(value, values[0]) if i else "") for i, value in enumerate(values)]


def rows() -> list[FigureRow]:
    """All figures."""
    found = _counts()
    for part, get in _SPREADS:
        found += [
            FigureRow(part=part, title=title, get=_of(get, name), show=words.seconds) for title, name in _PERCENTILES
        ]
    return [*found, *_throughput(), *_slo(), *_memory(), *_layout()]


def headline_rows() -> list[FigureRow]:
    """Those that people ask for first."""
    picked = []
    for part, get in _SPREADS[:2]:
        picked += [
            FigureRow(part="", title=f"{part} {title}", get=_of(get, name), show=words.seconds)
            for title, name in _PERCENTILES
            if name in ("p50", "p99")
        ]
    picked += [row for row in (*_throughput(), *_slo(), *_layout(), *_counts()) if row.title in _HEADLINE]
    return picked


_PERCENTILES = (
    ("mean", "mean"), ("P50", "p50"), ("P90", "p90"), ("P99", "p99"), ("P99.9", "p999"), ("max", "maximum"),
)  # fmt: skip

_SPREADS: tuple[tuple[str, Callable[[Figures], Spread | None]], ...] = (
    ("TTFT", lambda figures: figures.ttft_s),
    ("TPOT", lambda figures: figures.tpot_s),
    ("TBT", lambda figures: figures.tbt_s),
    ("Queue", lambda figures: figures.queue_s),
    ("End to end", lambda figures: figures.e2e_s),
    ("Longest gap in a stream", lambda figures: figures.longest_gap_s),
)

TBT = "tokens within their TBT SLO"

_HEADLINE = (
    "output tokens a second", f"SLO attainment at scale {HEADLINE_SCALE}", f"TBT attainment at scale {HEADLINE_SCALE}",
    f"goodput at scale {HEADLINE_SCALE} (requests/s)", "preemptions", "time with parameters dropped", "refused",
)  # fmt: skip


def _of(get: Callable[[Figures], Spread | None], name: str) -> Callable[[Figures], Number]:
    return lambda figures: None if get(figures) is None else getattr(get(figures), name)


def _counts() -> list[FigureRow]:
    get: tuple[tuple[str, Callable[[Figures], Number]], ...] = (
        ("arrived", lambda figures: figures.num_requests),
        ("finished", lambda figures: figures.num_finished),
        ("refused", lambda figures: figures.num_refused),
        ("unfinished", lambda figures: figures.num_unfinished),
    )
    return [FigureRow(part="Requests", title=title, get=find, show=words.count) for title, find in get]


def _throughput() -> list[FigureRow]:
    get: tuple[tuple[str, Callable[[Figures], Number]], ...] = (
        ("requests a second", lambda figures: figures.requests_per_s),
        ("output tokens a second", lambda figures: figures.output_tokens_per_s),
        ("all tokens a second", lambda figures: figures.total_tokens_per_s),
    )
    return [FigureRow(part="Throughput", title=title, get=find, show=words.rate) for title, find in get]


def _slo() -> list[FigureRow]:
    def at(scale: float, name: str) -> Callable[[Figures], Number]:
        return lambda figures: next((getattr(p, name) for p in figures.slo if p.scale == scale), None)

    found = [
        FigureRow(part="SLO", title=TBT, get=lambda f: f.tbt_attained, show=words.percent),
        FigureRow(
            part="SLO", title=f"{TBT}, with a token deposit", get=lambda f: f.tbt_attained_paced, show=words.percent
        ),
    ]
    for scale in (HEADLINE_SCALE, 10):
        found += [
            FigureRow(
                part="SLO", title=f"SLO attainment at scale {scale}", get=at(scale, "attained"), show=words.percent
            ),
            FigureRow(
                part="SLO", title=f"TBT attainment at scale {scale}", get=at(scale, "tbt_attained"), show=words.percent
            ),
            FigureRow(
                part="SLO",
                title=f"goodput at scale {scale} (requests/s)",
                get=at(scale, "goodput_per_s"),
                show=words.rate,
            ),
        ]
    return found


def _memory() -> list[FigureRow]:
    get: tuple[tuple[str, Callable[[Figures], Number]], ...] = (
        ("KV in use, mean", lambda figures: figures.kv_use_mean),
        ("KV in use, peak", lambda figures: figures.kv_use_peak),
        ("demand over room, peak", lambda figures: figures.demand_peak),
    )
    return [FigureRow(part="Memory", title=title, get=find, show=words.percent) for title, find in get]


def _layout() -> list[FigureRow]:
    return [
        FigureRow(part="Shape", title="changes of the layout", get=lambda f: f.num_switches, show=words.count),
        FigureRow(part="Shape", title="drop periods", get=lambda f: len(f.drops), show=words.count),
        FigureRow(
            part="Shape",
            title="time with parameters dropped",
            get=lambda f: sum(stop - start for start, stop in f.drops),
            show=words.seconds,
        ),
        FigureRow(
            part="Shape", title="prompt tokens found in caches", get=lambda f: f.cached_share, show=words.percent
        ),
        FigureRow(part="Shape", title="preemptions", get=lambda f: f.num_preemptions, show=words.count),
        FigureRow(part="Shape", title="requests moved", get=lambda f: f.num_moves, show=words.count),
    ]
