"""The charts of a page: what each shows of which runs. Axes are shared by all runs, so that charts compare."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from pengserve.planners.types.layout import GroupKind, degree_of
from pengserve.simulator.reports import words
from pengserve.simulator.reports.charts import BOTTOM, HEIGHT, NARROW, TOP, Axis, Chart, log_axis
from pengserve.simulator.reports.runs import Run
from pengserve.simulator.reports.sampling import Point, distribution, histogram_distribution
from pengserve.simulator.reports.slo import SloPoint
from pengserve.simulator.requests import Outcome
from pengserve.simulator.result import Moment

DEMAND, CAPACITY, USED, DROPPED = "var(--demand)", "var(--capacity)", "var(--used)", "var(--dropped)"
RUNNING, WAITING, UNPLACED = "var(--used)", "var(--waiting)", "var(--unplaced)"
NUM_RUN_COLORS = 6
MOST_LANES = 64  # more instances than these are drawn as shares
LANE_COLUMNS = 600  # what happens within one of them is drawn as one
KV_LEVELS = 5
KV_COLUMNS = 160


def run_color(index: int) -> str:
    """The colour of the run at `index` in charts that show several."""
    return f"var(--run{index % NUM_RUN_COLORS})"


def shape_color(shape: str) -> str:
    """dp, then a hue for tp and one for pp, darker with the degree."""
    if shape == GroupKind.DP:
        return "var(--dp)"
    degree = min(16, 1 << (degree_of(shape).bit_length() - 1))
    return f"var(--{shape[:2]}{degree})"


class TimeAxis:
    """Seconds of all runs as one axis, in the unit that fits."""

    def __init__(self, runs: Sequence[Run]) -> None:
        end_s = max([1e-3, *(run.result.end_s for run in runs)])
        self._unit_s, unit = words.clock(end_s)
        self.axis = Axis(high=end_s / self._unit_s, title=f"time since the start ({unit})", num_ticks=8)

    def at(self, seconds: float) -> float:
        """`seconds` in the axis's unit."""
        return seconds / self._unit_s

    def series(self, run: Run, get: Callable[[Moment], float]) -> list[Point]:
        """A field of the run's moments."""
        points = [(self.at(moment.at_s), get(moment)) for moment in run.result.moments]
        return [*points, (self.at(run.result.end_s), points[-1][1])] if points else []

    def drops(self, run: Run) -> list[tuple[float, float]]:
        """The run's drop periods."""
        return [(self.at(start), self.at(stop)) for start, stop in run.figures.drops]


def memory(run: Run, runs: Sequence[Run]) -> str:
    """KV that requests would hold, hold, and could hold, over time."""
    time = TimeAxis(runs)
    most = max([1, *(max(m.demand_tokens, m.held_tokens, m.used_tokens) for r in runs for m in r.result.moments)])
    chart = Chart(time.axis, Axis(high=1.05 * most, label=words.tick_count), title=f"{run.title}: KV over time")
    chart.periods(time.drops(run), DROPPED)
    chart.area(time.series(run, lambda moment: moment.used_tokens), USED)
    chart.line(time.series(run, lambda moment: moment.demand_tokens), DEMAND, is_stairs=True)
    if any(moment.held_tokens for moment in run.result.moments):
        chart.line(time.series(run, lambda moment: moment.held_tokens), CAPACITY, is_stairs=True, is_dashed=True)
    return chart.svg()


def queues(run: Run, runs: Sequence[Run]) -> str:
    """Requests that run, wait at instances and wait at the ingress, over time."""
    time = TimeAxis(runs)
    most = max([1, *(max(m.num_running, m.num_waiting, m.num_unplaced) for r in runs for m in r.result.moments)])
    chart = Chart(time.axis, Axis(high=1.05 * most, label=words.tick_count), title=f"{run.title}: requests over time")
    chart.periods(time.drops(run), DROPPED)
    chart.line(time.series(run, lambda moment: moment.num_running), RUNNING, is_stairs=True)
    chart.line(time.series(run, lambda moment: moment.num_waiting), WAITING, is_stairs=True)
    chart.line(time.series(run, lambda moment: moment.num_unplaced), UNPLACED, is_stairs=True)
    return chart.svg()


def ttft_over_time(run: Run, runs: Sequence[Run]) -> str:
    """A dot for each request: when it arrived, and its TTFT."""
    time = TimeAxis(runs)
    y = log_axis(_all(runs, _ttft), title="", label=words.tick_seconds)
    chart = Chart(time.axis, y, title=f"{run.title}: TTFT by time of arrival")
    chart.periods(time.drops(run), DROPPED)
    index = next(number for number, other in enumerate(runs) if other is run)
    dots = ((time.at(o.arrived_s), o.ttft_s) for o in run.result.outcomes if o.ttft_s is not None)
    chart.dots(dots, run_color(index))
    return chart.svg()


def ttft_distribution(runs: Sequence[Run]) -> str:
    """The share of requests with at most so long a TTFT."""
    return _distributions(runs, _ttft, "TTFT (logarithmic)")


def tpot_distribution(runs: Sequence[Run]) -> str:
    """The share of requests with at most so long a TPOT."""
    return _distributions(runs, _tpot, "TPOT (logarithmic)")


def tbt_distribution(runs: Sequence[Run]) -> str:
    """The share of gaps between two tokens that are at most so long; empty where no run tells them."""
    lines = [histogram_distribution(run.result.gaps.edges_s, run.result.gaps.counts) for run in runs]
    return _shares(lines, "time between two tokens (logarithmic)") if any(lines) else ""


def slo(runs: Sequence[Run]) -> str:
    """Attainment over the scale of the limits; empty where nothing was served."""
    y = Axis(high=1.0, label=_percent, num_ticks=5)
    return _over_scale(runs, y, lambda point: point.attained, "SLO attainment over scale")


def goodput(runs: Sequence[Run]) -> str:
    """Requests a second within the limits over their scale; empty where nothing was served."""
    most = max([1e-9, *(point.goodput_per_s for run in runs for point in run.figures.slo)])
    y = Axis(high=1.05 * most, label=words.tick_count, num_ticks=5)
    return _over_scale(runs, y, lambda point: point.goodput_per_s, "goodput over SLO scale")


def layout(run: Run, runs: Sequence[Run]) -> str:
    """Which shape each instance was in, over time: a lane an instance, or shares where there are too many."""
    time, lanes = TimeAxis(runs), run.result.num_instances
    is_share = lanes > MOST_LANES
    blocks = _shares_of_shapes(run, time) if is_share else _lanes(run, time)
    height = HEIGHT if is_share else TOP + BOTTOM + min(320, max(60, 22 * lanes))
    label: Callable[[float], str] = _percent if is_share else (lambda value: "")
    y = Axis(high=1.0 if is_share else max(1, lanes), label=label, num_ticks=5 if is_share else max(1, lanes))
    chart = Chart(time.axis, y, title=f"{run.title}: layout over time", height=height)
    for shape in sorted(blocks, key=lambda shape: (shape != "dp", shape)):
        chart.blocks(blocks[shape], shape_color(shape))
    return chart.svg()


def shapes_of(runs: Sequence[Run]) -> list[str]:
    """All shapes that any run was in, for a legend."""
    found = {shape for run in runs for shape, _ in run.figures.shape_shares}
    return sorted(found, key=lambda shape: (shape != "dp", shape[:2], degree_of(shape)))


def instance_kv(run: Run, runs: Sequence[Run]) -> str:
    """How full each instance's KV was, over time; empty where the run does not tell."""
    rows, lanes = run.result.instance_kv, run.result.num_instances
    if not rows or lanes > MOST_LANES or len(rows) != len(run.result.moments):
        return ""
    time = TimeAxis(runs)
    y = Axis(high=max(1, lanes), label=lambda value: "", num_ticks=max(1, lanes))
    height = TOP + BOTTOM + min(320, max(60, 22 * lanes))
    chart = Chart(time.axis, y, title=f"{run.title}: KV in use by instance", height=height)
    blocks: dict[int, list[tuple[float, float, float, float]]] = {}
    width_s = run.result.end_s / KV_COLUMNS
    for lane in range(lanes):
        fullest: dict[int, float] = {}
        for moment, row in zip(run.result.moments, rows, strict=True):
            column = min(KV_COLUMNS - 1, int(moment.at_s / width_s)) if width_s else 0
            fullest[column] = max(fullest.get(column, 0.0), row[lane])
        levels = [(column, min(KV_LEVELS - 1, int(fullest[column] * KV_LEVELS))) for column in sorted(fullest)]
        changes = [pair for i, pair in enumerate(levels) if not i or levels[i - 1][1] != pair[1]]
        for (column, level), (following, _) in pairwise([*changes, (KV_COLUMNS, 0)]):
            box = (time.at(column * width_s), time.at(following * width_s), lanes - lane - 0.92, lanes - lane - 0.08)
            blocks.setdefault(level, []).append(box)
    for level in sorted(blocks):
        chart.blocks(blocks[level], f"var(--kv{level})")
    return chart.svg()


def _lanes(run: Run, time: TimeAxis) -> dict[str, list[tuple[float, float, float, float]]]:
    """Rectangles by shape; members of a group that are neighbours share one. The first instance is on top."""
    lanes, blocks = run.result.num_instances, dict[str, list[tuple[float, float, float, float]]]()
    least = time.axis.high / LANE_COLUMNS
    newest: dict[tuple[str, int, int], int] = {}  # (shape, first, last) -> its last block
    for span in run.spans:
        start, stop = time.at(span.start_s), time.at(span.stop_s)
        for group in span.groups:
            for first, last in _neighbours(group.members):
                boxes, key = blocks.setdefault(group.shape, []), (group.shape, first, last)
                low, high = lanes - last - 0.92, lanes - first - 0.08
                before = newest.get(key)
                if before is not None and start - boxes[before][1] < least:
                    boxes[before] = (boxes[before][0], stop, low, high)
                else:
                    newest[key] = len(boxes)
                    boxes.append((start, stop, low, high))
    return blocks


def _shares_of_shapes(run: Run, time: TimeAxis) -> dict[str, list[tuple[float, float, float, float]]]:
    blocks: dict[str, list[tuple[float, float, float, float]]] = {}
    spans, least = run.spans, time.axis.high / LANE_COLUMNS
    kept = [span for i, span in enumerate(spans) if not i or time.at(span.stop_s - span.start_s) >= least]
    for span, after in zip(kept, [*(later.start_s for later in kept[1:]), run.result.end_s], strict=True):
        low, total = 0.0, sum(group.degree for group in span.groups)
        counts: dict[str, int] = {}
        for group in span.groups:
            counts[group.shape] = counts.get(group.shape, 0) + group.degree
        for shape, number in sorted(counts.items(), key=lambda pair: (pair[0] != "dp", pair[0])):
            high = low + number / max(1, total)
            blocks.setdefault(shape, []).append((time.at(span.start_s), time.at(after), low, high))
            low = high
    return blocks


def _neighbours(members: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of members that stand side by side, as (first, last)."""
    found: list[tuple[int, int]] = []
    for member in sorted(members):
        if found and found[-1][1] == member - 1:
            found[-1] = (found[-1][0], member)
        else:
            found.append((member, member))
    return found


def tbt(runs: Sequence[Run]) -> str:
    """Share of gaps between tokens within the limit, over scale."""
    y = Axis(high=1.0, label=_percent, num_ticks=5)
    return _over_scale(runs, y, lambda point: point.tbt_attained or 0.0, "TBT attainment over scale")


def _over_scale(runs: Sequence[Run], y: Axis, get: Callable[[SloPoint], float], title: str) -> str:
    scales = [point.scale for run in runs for point in run.figures.slo]
    if not scales:
        return ""
    x = Axis(low=min(scales), high=max(scales), title="SLO scale (multiples of the limits)", num_ticks=10)
    chart = Chart(x, y, title=title, width=NARROW)
    for index, run in enumerate(runs):
        chart.line([(point.scale, get(point)) for point in run.figures.slo], run_color(index))
    return chart.svg()


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _distributions(runs: Sequence[Run], get: Callable[[Outcome], float | None], title: str) -> str:
    lines = [distribution([v for o in run.result.outcomes if (v := get(o)) is not None]) for run in runs]
    return _shares(lines, title) if any(lines) else ""


def _shares(lines: Sequence[Sequence[Point]], title: str) -> str:
    x = log_axis((value for line in lines for value, _ in line), title=title, label=words.tick_seconds)
    chart = Chart(x, Axis(high=1.0, label=_percent, num_ticks=5), title=title, width=NARROW)
    for index, line in enumerate(lines):
        chart.line(line, run_color(index))
    return chart.svg()


def _all(runs: Sequence[Run], get: Callable[[Outcome], float | None]) -> list[float]:
    return [value for run in runs for outcome in run.result.outcomes if (value := get(outcome)) is not None]


def _ttft(outcome: Outcome) -> float | None:
    return outcome.ttft_s


def _tpot(outcome: Outcome) -> float | None:
    return outcome.tpot_s
