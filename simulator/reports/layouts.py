"""Which layouts a run went through, and for how long. Pure."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from pengserve.planners.types.events import EventKind
from pengserve.planners.types.layout import Group, GroupKind, parse_groups
from pengserve.simulator.result import Moment, Result

Period = tuple[float, float]  # [start, stop) in virtual seconds

_MORE = re.compile(r",? ?and \d+ more$")  # how the controller's log ends a layout of very many groups


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


def plain_groups(text: str) -> str:
    """Groups as the event log writes them, "tp2@(0,1), dp@(2), and 3 more", without commas and what is left out."""
    return _MORE.sub("", text).replace("), ", ") ")


def words_of(groups: Sequence[Group]) -> str:
    """Groups as counts of shapes, wide ones first."""
    counts = Counter((-group.degree, group.shape) for group in groups)
    return " + ".join(f"{count} {shape}" for (_, shape), count in sorted(counts.items())) or "none"


def layout_spans(result: Result) -> tuple[LayoutSpan, ...]:
    """The layouts of a run, one after the other: from its events, or where they do not tell, from its moments."""
    changes = _changes(result) or [(moment.at_s, moment.groups) for moment in result.moments]
    if not changes:
        return ()
    found: list[LayoutSpan] = []
    ends = [at_s for at_s, _ in changes[1:]]
    for (start_s, text), stop_s in zip(changes, [*ends, max(result.end_s, changes[-1][0])], strict=True):
        groups = _parse(text)
        if found and found[-1].groups == groups:
            found[-1] = LayoutSpan(start_s=found[-1].start_s, stop_s=stop_s, groups=groups)
        else:
            found.append(LayoutSpan(start_s=start_s, stop_s=stop_s, groups=groups))
    return tuple(found)


def _changes(result: Result) -> list[tuple[float, str]]:
    """(since when, groups) from the event log: to the instant, where moments are samples.

    Empty where the log does not tell the layout at the start, or has left groups out because they are so many.
    """
    events = [event for event in result.events if event.kind is EventKind.LAYOUT_CHANGED]
    texts = [str(event.data.get("groups", "")) for event in events]
    if not events or events[0].time_s > 0 or any(_MORE.search(text) or not text for text in texts):
        return []
    found = [(min(max(0.0, event.time_s), result.end_s), text) for event, text in zip(events, texts, strict=True)]
    return [change for i, change in enumerate(found) if i + 1 == len(found) or found[i + 1][0] > change[0]]


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
    groups = parse_groups(plain_groups(text))
    return tuple(sorted(groups, key=lambda group: group.leader))
