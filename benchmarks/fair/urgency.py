"""How long requests wait while they are urgent, where priorities change.

The first priority of a request tells nothing about a system that heeds updates: one that came as urgent and is not any
more has to wait. So a request's time until its first token is cut at the updates of its session, and only the parts in
which its client wished it among the most urgent levels count. All systems are held to the same wishes, also those that
take no updates.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fair.scoring import percentile
from benchmarks.fair.workload import Turn, Update, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Seconds of waiting for the first token while urgent, of all requests: most of them never wait so."""

    requests: int  # that did
    p90_s: float  # of all requests
    p99_s: float
    longest_s: float
    total_s: float


def waits(work: Workload, outcomes: Sequence[Mapping[str, Any]], below: int) -> Waits:
    """Args:
    outcomes: one for each turn, in the same order. One that never had a token has waited to the end of the run.
    below: priorities that are less than this are urgent.
    """
    by_session: defaultdict[str, list[Update]] = defaultdict(list)
    for update in work.updates:
        by_session[update.session].append(update)
    end_s = max((outcome["token_s"][-1] for outcome in outcomes if outcome["token_s"]), default=0.0)
    found = []
    for turn, outcome in zip(work.turns, outcomes, strict=True):
        until_s = outcome["token_s"][0] if outcome["token_s"] else end_s
        spans = wishes(turn, by_session[turn.session])
        found.append(sum(max(0.0, min(stop, until_s) - start) for start, stop, level in spans if level < below))
    return Waits(
        requests=sum(value > 0 for value in found),
        p90_s=percentile(found, 0.9),
        p99_s=percentile(found, 0.99),
        longest_s=max(found, default=0.0),
        total_s=sum(found),
    )


def wishes(turn: Turn, updates: Sequence[Update]) -> Iterator[tuple[float, float, int]]:
    """`(start, stop, priority)` in seconds, from when a turn comes.

    Args:
        updates: of its session, in the order of time.
    """
    start_s, priority = turn.at_s, turn.priority
    for update in updates:
        if update.at_s > turn.at_s:
            yield start_s, update.at_s, priority
            start_s, priority = update.at_s, update.priority
    yield start_s, float("inf"), priority
