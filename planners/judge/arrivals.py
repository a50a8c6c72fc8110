"""How many requests will come, judged by when they came of late.

A rate holds since requests have come at it: as far back as no count of some seconds differs from those after it by more
than chance. How long it will go on is judged by how long it has, and how long earlier bursts did (`judge.bursts`); then
the rate of the long run comes back.
"""

from math import sqrt
from typing import NamedTuple

import numpy as np

from pengserve.planners.columns import Floats
from pengserve.planners.judge.bursts import Bursts, Phase

CHUNK_S = 5.0  # whose counts are compared
FRESH_S, SURE = 0.9, 3.0  # seconds of the newest count; standard deviations of two counts that are no chance
QUARTER = 3.0  # of rates that went on for a while, one in four ends in 1/3 of that, and one in four lasts 3 times it


class Coming(NamedTuple):
    """Requests that come to the whole cluster, by second."""

    now: float
    later: float  # in the long run
    lasts_s: float  # after which 1/e of the difference between both is left


class Arrivals(NamedTuple):
    """What may come."""

    few: Coming
    expected: Coming
    many: Coming
    most: Coming  # as many at once as came at once before

    @classmethod
    def of(cls, times: Floats, came: Floats, phase: Phase, bursts: Bursts) -> "Arrivals":
        """From the times of looks, and how many requests had come by then; what was made of them, and seen before."""
        long_s, long = max(1e-9, times[-1] - times[0]), float(came[-1] - came[0])
        now, later = phase.now, long / long_s
        spread, long_spread = sqrt(phase.requests + 1.0) / max(1.0, phase.seconds), sqrt(long + 1.0) / max(1.0, long_s)
        lasts_s = bursts.lasts_s(phase, FRESH_S)
        short_s, wide_s = lasts_s / QUARTER, lasts_s * QUARTER
        is_burst = now > later
        many = Coming(now + spread, later + long_spread, wide_s if is_burst else short_s)
        highest = max(now + spread, later + long_spread, max(now, later) + _varied(times, came))
        return cls(
            few=Coming(max(0.0, now - spread), max(0.0, later - long_spread), short_s if is_burst else wide_s),
            expected=Coming(now, later, lasts_s),
            many=many,
            most=Coming(highest, highest, lasts_s),
        )


def phase_of(times: Floats, came: Floats) -> Phase:
    """From the times of looks, and how many requests had come by then."""
    begin = _begin(times, came)
    seconds, requests = max(1e-9, float(times[-1] - times[begin])), float(came[-1] - came[begin])
    before = float(came[begin] - came[0]) / float(times[begin] - times[0]) if begin else None
    return Phase(requests, seconds, before)


def _begin(times: Floats, came: Floats) -> int:
    """The look since which requests have come at the rate of now."""
    ages = times[-1] - times
    begin = max(0, int(np.searchsorted(-ages, -FRESH_S, side="right")) - 1)
    while begin > 0:
        # The newest chunk ends where the freshest count begins.
        edge = CHUNK_S * (ages[begin] // CHUNK_S + 1.0)
        before = max(0, int(np.searchsorted(-ages, -edge, side="right")) - 1)
        old, new = float(came[begin] - came[before]), float(came[-1] - came[begin])
        old_s, new_s = float(ages[before] - ages[begin]), float(ages[begin])
        if abs(new * old_s - old * new_s) > SURE * sqrt((old + new + 1.0) * old_s * new_s):
            break
        begin = before
    return begin


def mates_of(times: Floats, came: Floats) -> float:
    """How many requests come with one, in the mean, beyond those that come by chance between the same two looks.

    By chance come as many as in the seconds around these looks: a rate that grows or falls is none of it.
    """
    counts, seconds = np.diff(came), np.diff(times)
    total = float(counts.sum())
    if total <= 0.0:
        return 0.0
    at, middle = np.arange(len(counts)), 0.5 * (times[1:] + times[:-1])
    begins = np.minimum(at, np.searchsorted(times, middle - 0.5 * CHUNK_S))
    ends = np.maximum(at + 1, np.searchsorted(times, middle + 0.5 * CHUNK_S, side="right") - 1)
    others, others_s = came[ends] - came[begins] - counts, times[ends] - times[begins] - seconds
    by_chance = np.where(others_s > 0.0, others * seconds / np.maximum(others_s, 1e-9), counts)
    return max(0.0, float((counts * (counts - 1.0 - by_chance)).sum())) / total


def _varied(times: Floats, came: Floats) -> float:
    """Standard deviation of the rate from one `CHUNK_S` to another, beyond chance: requests do not come evenly."""
    begins = np.searchsorted(times, times - CHUNK_S, side="right") - 1
    is_whole = begins >= 0
    if not is_whole.any():
        return 0.0
    begins = begins[is_whole]
    rates = (came[is_whole] - came[begins]) / (times[is_whole] - times[begins])
    return sqrt(max(0.0, float(rates.var()) - float(rates.mean()) / CHUNK_S))
