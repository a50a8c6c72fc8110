"""Fewer points for the same picture: what a plot of so many pixels would show anyway. Pure."""

from collections.abc import Iterable, Sequence

Point = tuple[float, float]


def thin_line(points: Sequence[Point], columns: int, end_x: float) -> list[Point]:
    """At most four points a column: first, lowest, highest, last. Peaks and valleys stay, at their own place.

    `points` go from left to right, over `[0, end_x]`.
    """
    if len(points) <= 4 * columns or end_x <= 0:
        return list(points)
    found: list[Point] = []
    column: list[Point] = []
    number = 0
    for point in points:
        here = min(columns - 1, int(point[0] / end_x * columns))
        if here != number and column:
            found += _corners(column)
            column = []
        number = here
        column.append(point)
    return found + _corners(column)


def thin_dots(dots: Iterable[Point], cell: float) -> list[Point]:
    """One dot for each square of `cell` pixels that has any: dots that would hide each other are drawn once."""
    seen: dict[tuple[int, int], Point] = {}
    for x, y in dots:
        seen.setdefault((round(x / cell), round(y / cell)), (x, y))
    return list(seen.values())


def distribution(values: Sequence[float], points: int = 160) -> list[Point]:
    """(value, share of values not above it), from the least to the largest; closer together towards the tail."""
    ranked = sorted(values)
    if not ranked:
        return []
    size = len(ranked)
    ranks = {round(index * (size - 1) / points) for index in range(points + 1)}
    tail = 1.0
    while tail * size > 1:  # half of what is left, again and again: the last 1 % is where systems differ
        ranks |= {min(size - 1, round(size * (1 - tail * part / 8))) for part in range(4, 9)}
        tail /= 2
    return [(ranked[rank], (rank + 1) / size) for rank in sorted(ranks | {0, size - 1})]


def histogram_distribution(edges: Sequence[float], counts: Sequence[int]) -> list[Point]:
    """The same of a histogram, at the upper edges of its bins."""
    total, before = sum(counts), 0
    if not total:
        return []
    first = next(index for index, count in enumerate(counts) if count)
    found = [(edges[first], 0.0)]
    for index in range(first, len(counts)):
        before += counts[index]
        if counts[index]:
            found.append((edges[index + 1], before / total))
    return found


def _corners(column: Sequence[Point]) -> list[Point]:
    picked = {0, len(column) - 1}
    picked.add(min(range(len(column)), key=lambda index: column[index][1]))
    picked.add(max(range(len(column)), key=lambda index: column[index][1]))
    return [column[index] for index in sorted(picked)]
