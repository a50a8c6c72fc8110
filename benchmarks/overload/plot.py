"""Demand, capacity and TTFT over time as an SVG: a panel for each system, drop periods shaded."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Protocol

from benchmarks.overload.timeline import SAMPLE_S, Timeline
from pengserve.simulator.reports.charts import ticks

WIDTH, PANEL_HEIGHT, GAP = 960, 150, 44
LEFT, RIGHT, TOP = 70, 60, 60
LEAST_TTFT_S = 0.01  # the right axis is logarithmic
DEMAND, CAPACITY, TTFT, DROPPED, BURST = "#1a73e8", "#202124", "#d93025", "#e8eaed", "#f9ab00"
LEGEND = (
    (DEMAND, "demand (tokens of KV)"),
    (CAPACITY, "capacity"),
    (TTFT, "TTFT of each request (s, right)"),
    (BURST, "burst"),
    (DROPPED, "parameters dropped"),
)


class Drawn(Protocol):
    """What a panel shows."""

    @property
    def system(self) -> str:
        """Its name's key."""

    @property
    def timeline(self) -> Timeline:
        """What happened when."""


class _Scale:
    """Seconds, tokens and TTFT to pixels; one for all panels, so that they compare."""

    def __init__(self, lines: Sequence[Timeline]) -> None:
        self.end_s = max(1.0, *(line.end_s for line in lines))
        tokens = [value for line in lines for value in (*line.demand, *(held for _, held in line.capacity))]
        self.tokens = 1.05 * max([1.0, *tokens])
        slowest = max([0.1, *(ttft for line in lines for _, ttft in line.ttft)])
        self.decades = math.ceil(math.log10(slowest / LEAST_TTFT_S))

    def x(self, time_s: float) -> float:
        """Pixels from the left."""
        return LEFT + max(0.0, time_s) / self.end_s * (WIDTH - LEFT - RIGHT)

    def y(self, tokens: float) -> float:
        """Pixels below the panel's top."""
        return PANEL_HEIGHT * (1 - tokens / self.tokens)

    def y_ttft(self, ttft_s: float) -> float:
        """Pixels below the panel's top."""
        share = math.log10(max(ttft_s, LEAST_TTFT_S) / LEAST_TTFT_S) / self.decades
        return PANEL_HEIGHT * (1 - share)


def draw(runs: Sequence[Drawn], names: Mapping[str, str]) -> str:
    """The whole drawing as SVG text; a panel for each run."""
    scale = _Scale([run.timeline for run in runs])
    height = TOP + len(runs) * (PANEL_HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_legend(),
    ]
    for index, run in enumerate(runs):
        top = TOP + index * (PANEL_HEIGHT + GAP)
        title = escape(names.get(run.system, run.system))
        parts += [f'<g transform="translate(0 {top})">', *_panel(run.timeline, scale, title), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> list[str]:
    parts, x = [], LEFT
    for color, words in LEGEND:
        parts.append(f'<rect x="{x}" y="14" width="14" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x + 19}" y="23" fill="#333">{words}</text>')
        x += 45 + 7 * len(words)
    return parts


def _panel(line: Timeline, scale: _Scale, title: str) -> list[str]:
    return [
        f'<text x="{LEFT}" y="-8" font-weight="bold">{title}</text>',
        *_spans(line.drops, scale, 0, PANEL_HEIGHT, DROPPED),
        *_spans(line.bursts, scale, PANEL_HEIGHT - 5, 5, BURST),
        *_axes(scale),
        _path(((i * SAMPLE_S, tokens) for i, tokens in enumerate(line.demand)), scale, DEMAND),
        _path(_stairs(line), scale, CAPACITY),
        _dots(line.ttft, scale),
    ]


def _dots(ttft: Iterable[tuple[float, float]], scale: _Scale) -> str:
    """A dot a request, all in one path: an element for each made a plot of two thousand requests 200 kB."""
    places = "".join(f"M{scale.x(at_s):.1f},{scale.y_ttft(ttft_s):.1f}h0" for at_s, ttft_s in ttft)
    return f'<path d="{places}" stroke="{TTFT}" stroke-width="4" stroke-linecap="round" stroke-opacity="0.7"/>'


def _axes(scale: _Scale) -> list[str]:
    right = WIDTH - RIGHT
    parts = [
        f'<rect x="{LEFT}" y="0" width="{right - LEFT}" height="{PANEL_HEIGHT}" fill="none" stroke="#999"/>',
    ]
    for tokens in ticks(scale.tokens, 4):
        y = scale.y(tokens) + 4
        parts.append(f'<text x="{LEFT - 6}" y="{y:.1f}" text-anchor="end" fill="#333">{tokens:g}</text>')
    for decade in range(scale.decades + 1):
        ttft_s = LEAST_TTFT_S * 10**decade
        parts.append(f'<text x="{right + 6}" y="{scale.y_ttft(ttft_s) + 4:.1f}" fill="{TTFT}">{ttft_s:g}</text>')
    for time_s in ticks(scale.end_s, 8):
        x = scale.x(time_s)
        parts.append(f'<text x="{x:.1f}" y="{PANEL_HEIGHT + 16}" text-anchor="middle" fill="#333">{time_s:g} s</text>')
    return parts


def _spans(spans: Iterable[tuple[float, float]], scale: _Scale, y: int, height: int, color: str) -> list[str]:
    return [
        f'<rect x="{scale.x(start):.1f}" y="{y}" width="{max(1.0, scale.x(stop) - scale.x(start)):.1f}" '
        f'height="{height}" fill="{color}"/>'
        for start, stop in spans
    ]


def _path(points: Iterable[tuple[float, float]], scale: _Scale, color: str) -> str:
    text = " ".join(f"{scale.x(time_s):.1f},{scale.y(tokens):.1f}" for time_s, tokens in points)
    return f'<polyline points="{text}" fill="none" stroke="{color}" stroke-width="1.5"/>'


def _stairs(line: Timeline) -> list[tuple[float, float]]:
    """Capacity as a line with steps, until the end."""
    points: list[tuple[float, float]] = []
    for time_s, tokens in line.capacity:
        if points:
            points.append((time_s, points[-1][1]))
        points.append((time_s, tokens))
    return [*points, (line.end_s, points[-1][1])] if points else []
