"""One picture of all cases: a cell for each, with the ratio in it and a colour for how good it is."""

import math
from collections.abc import Callable, Sequence
from html import escape

from benchmarks.regret.cases import OURS
from benchmarks.regret.law import Ratios, best_static, ratios
from benchmarks.regret.run import Measured

CELL, ROW, LEFT, TOP, GAP = 46, 24, 130, 70, 60  # pixels
FULL = 1.0  # binary logarithm of the ratio at which a colour is deepest
GOOD, BAD = (26, 115, 232), (217, 48, 37)


def draw(found: Sequence[Measured]) -> str:
    """The picture as SVG text: goodput on the left, P99 TTFT on the right; rows are traces."""
    columns = list(dict.fromkeys((m.case.machine, m.case.scale) for m in sorted(found, key=_order)))
    traces = list(dict.fromkeys(m.case.trace for m in found))
    width = 2 * (LEFT + CELL * len(columns)) + GAP
    height = TOP + ROW * len(traces) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    panels: tuple[tuple[str, Callable[[Ratios], float], int], ...] = (
        ("Goodput, PengServe / best static layout", lambda r: r.goodput, 1),
        ("P99 TTFT, PengServe / best static layout", lambda r: r.ttft_p99, -1),
    )
    for number, (title, get, sign) in enumerate(panels):
        left = LEFT + number * (LEFT + CELL * len(columns) + GAP)
        parts += _panel(found, columns, traces, left, title, get, sign)
    words = "Blue is better than the best static layout, red is worse; the deepest colours are twice and half."
    parts.append(f'<text x="{LEFT}" y="{height - 12}" fill="#5f6368">{words}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    found: Sequence[Measured],
    columns: Sequence[tuple[str, float]],
    traces: Sequence[str],
    left: int,
    title: str,
    get: Callable[[Ratios], float],
    sign: int,
) -> list[str]:
    parts = [f'<text x="{left}" y="20" font-size="14">{escape(title)}</text>']
    machines = list(dict.fromkeys(machine for machine, _ in columns))
    for machine in machines:
        first = next(i for i, (name, _) in enumerate(columns) if name == machine)
        parts.append(f'<text x="{left + first * CELL + 4}" y="42">{escape(machine)}</text>')
    for i, (_, scale) in enumerate(columns):
        parts.append(f'<text x="{left + i * CELL + 4}" y="{TOP - 8}" fill="#5f6368">{scale:g}x</text>')
    for j, trace in enumerate(traces):
        y = TOP + (j + 0.65) * ROW
        parts.append(f'<text x="{left - 8}" y="{y:.0f}" text-anchor="end">{escape(trace)}</text>')
    for measured in found:
        row = measured.row(OURS)
        if row is None:
            continue
        value = get(ratios(row, best_static(measured)))
        i, j = columns.index((measured.case.machine, measured.case.scale)), traces.index(measured.case.trace)
        x, y = left + i * CELL, TOP + j * ROW
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{ROW - 2}" fill="{_color(value, sign)}">'
            f"<title>{escape(measured.case.name)}: {value:.2f}</title></rect>"
            f'<text x="{x + CELL / 2 - 1:.0f}" y="{y + 0.65 * ROW:.0f}" text-anchor="middle">{value:.2f}</text>'
        )
    return parts


def _color(value: float, sign: int) -> str:
    depth = sign * math.log2(min(16.0, max(1 / 16, value)))
    share = min(1.0, abs(depth) / FULL)
    target = GOOD if depth > 0 else BAD
    red, green, blue = (round(255 + share * 0.8 * (channel - 255)) for channel in target)
    return f"rgb({red},{green},{blue})"


def _order(measured: Measured) -> tuple[str, float]:
    return measured.case.machine, measured.case.scale
