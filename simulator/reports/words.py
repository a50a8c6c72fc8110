"""Numbers as people read them in cards, tables and on axes."""

import math

NONE, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"


def seconds(value: float | None) -> str:
    """A duration of any size: "1.42 ms", "0.310 s", "2 min 05 s", "1 h 02 min"; a dash where there is none."""
    if value is None:
        return NONE
    if value <= 0:
        return "0 s"
    if value < 0.0995:
        return f"{_three(value * 1e3)} ms"
    if value < 120:
        return f"{_three(value)} s"
    if round(value) < 3600:
        return f"{round(value) // 60} min {round(value) % 60:02d} s"
    minutes = round(value / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def tick_seconds(value: float) -> str:
    """A round duration on an axis."""
    if value == 0:
        return "0"
    return f"{value * 1e3:g} ms" if value < 1 else f"{value:g} s"


def clock(end_s: float) -> tuple[float, str]:
    """(seconds of one unit, its name) for a time axis that ends at `end_s`."""
    if end_s > 4 * 3600:
        return 3600.0, "hours"
    return (60.0, "minutes") if end_s > 600 else (1.0, "seconds")


def count(value: float | None) -> str:
    """A number of things: "19,366", "1.25 M"; a dash where there is none."""
    if value is None:
        return NONE
    if abs(value) >= 10e6:
        return f"{value / 1e6:.4g} M"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.2f} M"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else _three(value)


def tick_count(value: float) -> str:
    """A round number on an axis: "40 k", "1.5 M"."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g} {letter}"
    return f"{value:g}"


def percent(share: float | None) -> str:
    """A share of one: "97.2 %"; a dash where there is none."""
    if share is None:
        return NONE
    if 0.9995 <= share < 1:
        return f"{math.floor(share * 1e4) / 100:.2f} %"  # almost all is not all
    return f"{100 * share:.1f} %"


def rate(value: float | None) -> str:
    """So many a second, without the unit."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else _three(value)


def ratio(value: float | None, base: float | None) -> str:
    """`value` over `base`: "×0.31"; empty where there is nothing to compare."""
    if value is None or base is None or base == 0:
        return ""
    return f"{TIMES}{value / base:.2f}" if value / base < 10 else f"{TIMES}{_three(value / base)}"


def _three(value: float) -> str:
    """Three digits that count, and no exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:#.3g}"
