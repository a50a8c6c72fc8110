"""Drains as an SVG: what the bytes need, how long they took to move, and what the streams noticed; a row a drain."""

from collections.abc import Sequence

from benchmarks.migrate.measure import Sample

WIDTH, ROW_HEIGHT, LEFT, RIGHT, TOP = 960, 46, 90, 30, 44
NEED, MOVED, ENDED, GAP, QUIET = "#202124", "#1a73e8", "#dadce0", "#d93025", "#f9ab00"
LEGEND = (
    (NEED, "its bytes alone"),
    (MOVED, "all streams have moved"),
    (ENDED, "process has ended"),
    (GAP, "longest wait of a stream"),
    (QUIET, "the same undisturbed"),
)


def draw(drains: Sequence[Sample]) -> str:
    """The whole drawing as SVG text. Bars begin when the drain is asked for, or with the wait."""
    longest_s = max([0.1, *(max(s.done_s, s.moving_s, s.gap_s or 0.0) for s in drains)])
    height = TOP + len(drains) * ROW_HEIGHT + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_legend(),
    ]
    for index, sample in enumerate(drains):
        top = TOP + index * ROW_HEIGHT
        parts.append(f'<text x="{LEFT - 8}" y="{top + 22}" text-anchor="end">drain {index + 1}</text>')
        bars = ((sample.done_s, ENDED), (sample.moving_s, MOVED), (sample.need_s, NEED))
        parts += [_bar(seconds / longest_s, top, 18, color) for seconds, color in bars]
        waits = ((sample.gap_s or 0.0, 22, GAP), (sample.quiet_gap_s or 0.0, 31, QUIET))
        parts += [_bar(seconds / longest_s, top + y, 7, color) for seconds, y, color in waits]
    scale = f"{1e3 * longest_s:.0f} ms"
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{height - 6}" text-anchor="end" fill="#333">{scale}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(share: float, y: int, height: int, color: str) -> str:
    width = share * (WIDTH - LEFT - RIGHT)
    return f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{height}" fill="{color}"/>'


def _legend() -> list[str]:
    parts, x = [], LEFT
    for color, words in LEGEND:
        parts.append(f'<rect x="{x}" y="14" width="14" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x + 19}" y="23" fill="#333">{words}</text>')
        x += 45 + 7 * len(words)
    return parts
