"""What happened when in one run: demand from the answers, capacity and drop periods from the layouts. Pure."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.figures import complete
from benchmarks.sse import Answer
from pengserve.planners.types.layout import Group, GroupKind, parse_groups
from pengserve.planners.types.units import blocks_for

SAMPLE_S = 0.25
Period = tuple[float, float]  # (start, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChange:
    """The layout from one moment on."""

    time_s: float
    groups: tuple[Group, ...]

    @property
    def is_dropped(self) -> bool:
        """Whether parameters are dropped anywhere."""
        return any(group.kind is GroupKind.PP for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One run. Times are seconds since its begin; memory is in tokens of KV."""

    end_s: float
    bursts: tuple[Period, ...]
    demand: tuple[float, ...]  # of all requests in flight, every `SAMPLE_S` from 0 on
    capacity: tuple[tuple[float, float], ...]  # (from when on, tokens)
    drops: tuple[Period, ...]
    ttft: tuple[tuple[float, float], ...]  # (when the request was sent, seconds), of complete answers

    @property
    def backs_s(self) -> tuple[float | None, ...]:
        """For each burst, how long after its end the layout was all dp again.

        0 where nothing had been dropped; None where it did not come back before the next burst, or the end.
        """
        limits = [*(start for start, _ in self.bursts[1:]), float("inf")]
        return tuple(_back_s(self.drops, stop, limit) for (_, stop), limit in zip(self.bursts, limits, strict=True))


def demand(answers: Iterable[Answer], start_s: float, end_s: float, block_size: int) -> tuple[float, ...]:
    """Tokens of KV that all requests in flight would hold, running or waiting, every `SAMPLE_S` from `start_s` on."""
    flights = [(a.sent_s, a.event_times_s[-1], a) for a in complete(answers)]
    found = []
    for index in range(int((end_s - start_s) / SAMPLE_S) + 1):
        now_s = start_s + index * SAMPLE_S
        here = [answer for sent_s, done_s, answer in flights if sent_s <= now_s < done_s]
        found.append(float(sum(_blocks(answer, now_s, block_size) for answer in here) * block_size))
    return tuple(found)


def capacity(changes: Sequence[LayoutChange], tokens_of: Callable[[Group], int]) -> tuple[tuple[float, float], ...]:
    """(from when on, tokens) that all groups together hold."""
    return tuple((c.time_s, float(sum(tokens_of(group) for group in c.groups))) for c in changes)


def drop_periods(changes: Sequence[LayoutChange], end_s: float) -> tuple[Period, ...]:
    """When parameters were dropped anywhere; what has not come back ends at `end_s`. Static pipelines drop none."""
    found: list[Period] = []
    if changes and changes[0].is_dropped:
        return ()
    since_s: float | None = None
    for change in changes:
        if change.is_dropped and since_s is None:
            since_s = change.time_s
        elif not change.is_dropped and since_s is not None:
            found.append((since_s, change.time_s))
            since_s = None
    return tuple(found) if since_s is None else (*found, (since_s, end_s))


def groups_of(text: str) -> tuple[Group, ...]:
    """The groups of a LAYOUT_CHANGED event."""
    return parse_groups(text.replace("), ", ") "))


def mean_until(samples: Sequence[float], end_s: float) -> float:
    """Mean of what was sampled every `SAMPLE_S` before `end_s`."""
    inside = samples[: max(1, int(end_s / SAMPLE_S))]
    return sum(inside) / max(1, len(inside))


def _blocks(answer: Answer, now_s: float, block_size: int) -> int:
    share = bisect_right(answer.event_times_s, now_s) / len(answer.event_times_s)
    return blocks_for(answer.prompt_tokens + round(share * answer.output_tokens), block_size)


def _back_s(drops: Sequence[Period], stop_s: float, limit_s: float) -> float | None:
    """From `stop_s` until the last drop period that begins before `limit_s` has ended."""
    ends = [end for start, end in drops if start < limit_s and end > stop_s]
    if not ends:
        return 0.0
    return ends[-1] - stop_s if ends[-1] < limit_s else None
