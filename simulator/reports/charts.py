"""Small charts as SVG text: axes with round ticks, lines, dots, shaded periods and lanes. Nothing is fetched.

Colours are CSS values, so that a page can give variables that follow its theme. Sizes are pixels of the drawing.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from pengserve.simulator.reports.sampling import Point, thin_dots, thin_line

WIDE, NARROW, HEIGHT = 1000, 540, 240  # a chart over the whole page, one of two side by side
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 10, 36
DOT = 1.6  # pixels that a cell of dots is wide


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What one direction of a chart shows: `[low, high]`, evenly or over the logarithm (then `low` is above zero)."""

    low: float = 0.0
    high: float
    is_log: bool = False
    title: str = ""
    label: Callable[[float], str] = "{:g}".format
    num_ticks: int = 6

    def share(self, value: float) -> float:
        """Where `value` is, in `[0, 1]`; what lies outside is put on the edge."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log10(max(value, self.low)), math.log10(self.low), math.log10(self.high)
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0

    def ticks(self) -> list[float]:
        """Round values inside."""
        found = log_ticks(self.low, self.high, self.num_ticks) if self.is_log else ticks(self.high, self.num_ticks)
        slack = 1e-9 * abs(self.high)
        return [value for value in found if self.low - slack <= value <= self.high + slack]


class Chart:
    """One chart, drawn from back to front in the order of the calls."""

    def __init__(self, x: Axis, y: Axis, *, title: str, width: int = WIDE, height: int = HEIGHT) -> None:
        """`title` is read to those who do not see the drawing."""
        self.x, self.y, self._title = x, y, title
        self._width, self._height = width, height
        self._parts: list[str] = []

    def line(self, points: Sequence[Point], color: str, *, is_stairs: bool = False, is_dashed: bool = False) -> None:
        """A line through `points`, which go from left to right; with stairs each value stands until the next."""
        if points:
            dashed = ";stroke-dasharray:6 4" if is_dashed else ""
            path = self._path(points, is_stairs)
            self._parts.append(f'<path class="line" style="stroke:{color}{dashed}" d="{path}"/>')

    def area(self, points: Sequence[Point], color: str) -> None:
        """What is below the stairs through `points`."""
        if points:
            path = self._path(points, True)
            bottom, first = self._height - BOTTOM, self._x(points[0][0])
            self._parts.append(f'<path class="area" style="fill:{color}" d="{path}V{bottom}H{first:.1f}z"/>')

    def dots(self, points: Iterable[Point], color: str) -> None:
        """A dot for each point; those that would cover each other are one."""
        pixels = thin_dots(((self._x(x), self._y(y)) for x, y in points), DOT)
        if pixels:
            path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in pixels)
            self._parts.append(f'<path class="dots" style="stroke:{color}" d="{path}"/>')

    def periods(self, periods: Iterable[tuple[float, float]], color: str) -> None:
        """Spans of the horizontal axis, shaded over the whole height; each can be seen, however short."""
        for start, stop in periods:
            x = self._x(start)
            width = max(1.0, self._x(stop) - x)
            self._parts.append(
                f'<rect class="period" x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{self._inner}"'
                f' style="fill:{color}"/>'
            )

    def blocks(self, blocks: Iterable[tuple[float, float, float, float]], color: str) -> None:
        """Rectangles `(start, stop, low, high)` in the units of the axes, in one colour."""
        path = []
        for start, stop, low, high in blocks:
            x, top = self._x(start), self._y(high)
            width, height = max(0.5, self._x(stop) - x), max(0.5, self._y(low) - top)
            path.append(f"M{x:.1f} {top:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z")
        if path:
            self._parts.append(f'<path class="block" style="fill:{color}" d="{"".join(path)}"/>')

    def svg(self) -> str:
        """The drawing."""
        return "\n".join(
            [
                f'<svg viewBox="0 0 {self._width} {self._height}" role="img" aria-label="{escape(self._title)}">',
                *self._grid(),
                *self._parts,
                *self._labels(),
                "</svg>",
            ]
        )

    @property
    def _inner(self) -> int:
        return self._height - TOP - BOTTOM

    def _path(self, points: Sequence[Point], is_stairs: bool) -> str:
        kept = points if self.x.is_log else thin_line(points, self._width - LEFT - RIGHT, self.x.high)
        path, last_y = [], ""
        for number, (x, y) in enumerate(kept):
            at_x, at_y = f"{self._x(x):.1f}", f"{self._y(y):.1f}"
            if number and is_stairs:
                path.append(f"H{at_x}V{at_y}" if at_y != last_y else f"H{at_x}")
            else:
                path.append(f"{'L' if number else 'M'}{at_x} {at_y}")
            last_y = at_y
        return "".join(path)

    def _x(self, value: float) -> float:
        return LEFT + self.x.share(value) * (self._width - LEFT - RIGHT)

    def _y(self, value: float) -> float:
        return TOP + (1 - self.y.share(value)) * self._inner

    def _grid(self) -> list[str]:
        rows = "".join(f"M{LEFT} {self._y(value):.1f}H{self._width - RIGHT}" for value in self.y.ticks())
        columns = "".join(f"M{self._x(value):.1f} {TOP}V{self._height - BOTTOM}" for value in self.x.ticks())
        return [f'<path class="grid" d="{rows}{columns}"/>']

    def _labels(self) -> list[str]:
        bottom = self._height - BOTTOM
        found = [
            f'<text x="{LEFT - 8}" y="{self._y(value) + 4:.1f}" text-anchor="end">{escape(self.y.label(value))}</text>'
            for value in self.y.ticks()
        ]
        for value in self.x.ticks():
            label = escape(self.x.label(value))
            found.append(f'<text x="{self._x(value):.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
        if self.x.title:
            middle = (LEFT + self._width - RIGHT) / 2
            found.append(
                f'<text class="title" x="{middle:.0f}" y="{self._height - 5}" text-anchor="middle">'
                f"{escape(self.x.title)}</text>"
            )
        return found


def ticks(most: float, count: int) -> list[float]:
    """Round numbers from 0 to `most`, about `count` of them."""
    if most <= 0:
        return [0.0]
    rough = most / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5) if factor * power >= rough), 10 * power)
    return [index * step for index in range(int(most / step * (1 + 1e-12)) + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Powers of ten from `low` to `high`, with 2 and 5 between them where that stays near `count`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if math.log10(high / low) * 3 <= count + 1 else (1,)
    return [factor * 10.0**power for power in range(first, last + 1) for factor in factors]


def log_axis(values: Iterable[float], *, title: str, label: Callable[[float], str], floor: float = 1e-4) -> Axis:
    """An axis over the logarithm that holds all `values`; those below `floor` are on its edge."""
    known = [value for value in values if value > 0] or [floor, 10 * floor]
    low, high = max(floor, min(known)), max(floor, *known)
    low = _round_down(low)
    return Axis(low=low, high=max(_round_up(high), 10 * low), is_log=True, title=title, label=label)


def _round_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return float(max(factor for factor in (1, 2, 5) if factor * power <= value * (1 + 1e-9)) * power)


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return float(min(factor for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9)) * power)
