"""Figures that more than one benchmark takes from its answers and samples."""

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from benchmarks.sse import Answer


def complete(answers: Iterable[Answer]) -> list[Answer]:
    """The answers without an error."""
    return [answer for answer in answers if not answer.error]


def ttfts_s(answers: Iterable[Answer]) -> list[float]:
    """Of each complete answer: from sending the request to the first event with text."""
    return [answer.first_text_s - answer.sent_s for answer in complete(answers)]


def tpots_s(answers: Iterable[Answer]) -> list[float]:
    """Of each complete answer of two tokens or more: (last event - first) / (output tokens - 1)."""
    return [
        (answer.event_times_s[-1] - answer.first_text_s) / (answer.output_tokens - 1)
        for answer in complete(answers)
        if answer.output_tokens > 1
    ]


def gaps_s(answers: Iterable[Answer]) -> list[float]:
    """Of all complete answers: from each event with text to the next one."""
    return [later - earlier for answer in complete(answers) for earlier, later in pairwise(answer.event_times_s)]


def longest_gap_s(answer: Answer) -> float:
    """The longest time from one event with text to the next; 0 where there is one event."""
    return max((later - earlier for earlier, later in pairwise(answer.event_times_s)), default=0.0)


def mean(values: Sequence[float]) -> float:
    """Not a number where there are none."""
    return statistics.fmean(values) if values else math.nan


def percentile(values: Sequence[float], percent: float) -> float:
    """Not a number where there are none."""
    return float(np.percentile(values, percent)) if values else math.nan


def ratio(subject: float, other: float) -> float:
    """subject / other; not a number where the other is zero (events that arrive together have no gap)."""
    return subject / other if other else math.nan


def silence_s(answers: Iterable[Answer]) -> float:
    """The longest time in which one of the servers had requests and sent a text of none, in seconds."""
    by_server: dict[int, list[tuple[float, int]]] = {}  # times, with the change in requests that are there
    for answer in complete(answers):
        *texts, end_s = answer.event_times_s
        events = by_server.setdefault(answer.server, [])
        events += [(answer.sent_s, 1), *((time_s, 0) for time_s in texts), (end_s, -1)]
    return max((_longest_wait_s(sorted(events)) for events in by_server.values()), default=0.0)


def _longest_wait_s(events: Sequence[tuple[float, int]]) -> float:
    longest_s, since_s, num_there = 0.0, 0.0, 0
    for time_s, change in events:
        if change <= 0:
            longest_s = max(longest_s, time_s - since_s)
        if not num_there or change <= 0:
            since_s = time_s
        num_there += change
    return longest_s
