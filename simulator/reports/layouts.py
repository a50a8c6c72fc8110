"""Which layouts a run went through, and for how long. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from pengserve.planners.types.layout import Group, GroupKind, parse_groups
from pengserve.simulator.result import Moment, Result

Period = tuple[float, float]  # [start, stop) in virtual seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSpan:
    """One layout, for as long as it stood."""

    start_s: float
    stop_s: float
    groups: tuple[Group, ...]

    @property
    def is_dropped(self) -> bool:
        """Whether parameters are dropped anywhere: members of a pipeline keep a part of the layers each."""
        return any(group.kind is GroupKind.PP for group in self.groups)

    @property
    def words(self) -> str:
        """The layout as counts of shapes, wide ones first: "1 pp4 + 4 dp"."""
        return words_of(self.groups)


def words_of(groups: Sequence[Group]) -> str:
    """Groups as counts of shapes, wide ones first."""
    counts = Counter((-group.degree, group.shape) for group in groups)
    return " + ".join(f"{count} {shape}" for (_, shape), count in sorted(counts.items())) or "none"


def layout_spans(result: Result) -> tuple[LayoutSpan, ...]:
    """The layouts of a run, one after the other. A layout begins where a moment first shows it."""
    found: list[LayoutSpan] = []
    for start_s, stop_s, moment in intervals(result):
        groups = _parse(moment.groups)
        if found and found[-1].groups == groups:
            found[-1] = LayoutSpan(start_s=found[-1].start_s, stop_s=stop_s, groups=groups)
        else:
            found.append(LayoutSpan(start_s=start_s, stop_s=stop_s, groups=groups))
    return tuple(found)


def drop_periods(spans: Sequence[LayoutSpan]) -> tuple[Period, ...]:
    """When parameters were dropped anywhere. Pipelines that stand from the start to the end have dropped nothing."""
    if spans and all(span.is_dropped for span in spans):
        return ()
    found: list[Period] = []
    for span in spans:
        if span.is_dropped and found and found[-1][1] == span.start_s:
            found[-1] = (found[-1][0], span.stop_s)
        elif span.is_dropped:
            found.append((span.start_s, span.stop_s))
    return tuple(found)


def intervals(result: Result) -> list[tuple[float, float, Moment]]:
    """(start, stop, moment): each moment stands until the next one, the last until the end of the run."""
    moments = result.moments
    if not moments:
        return []
    found = [(now.at_s, then.at_s, now) for now, then in pairwise(moments)]
    return [*found, (moments[-1].at_s, max(result.end_s, moments[-1].at_s), moments[-1])]


@lru_cache(maxsize=256)
def _parse(text: str) -> tuple[Group, ...]:
    # An event of the log writes "tp2@(0,1), dp@(2)"; a moment has no commas between the groups.
    return parse_groups(text.replace("), ", ") "))
