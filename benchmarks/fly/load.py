"""The loads: Poisson arrivals from a fixed seed, the same for every system of a round.

Texts differ from system to system, since all systems share one prefix cache; lengths and times do not.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.client import Request
from benchmarks.harness import engine_flags, text

URGENT = -1  # OpenAI's `priority`: below zero is urgent


class Phase(StrEnum):
    """What a request was sent in."""

    LOW = "low"
    BURST = "burst"
    AFTER = "after"  # low again, while what the burst left ends and the planner waits its dwell
    MIX = "mix"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One benchmark run. Shares are of the requests per second that static dp completes when it is saturated."""

    model: Path
    rounds: int = 3
    num_instances: int = 2  # of the bursty load
    num_mix_instances: int = 4  # of the priority mix: a group for the urgent must leave somebody to the rest
    low_s: float = 12.0
    burst_s: float = 8.0
    after_s: float = 8.0  # longer than `min_dwell_s` and `quiet_s` together
    low_share: float = 0.1
    burst_share: float = 0.9
    mix_s: float = 16.0
    mix_shares: tuple[float, float] = (0.6, 1.0)  # between which the rate goes up and down; the paper's is 3 to 5
    mix_period_s: float = 4.0  # of one going up and down
    urgent_share: float = 0.2  # of the requests of the mix
    calibrate_s: float = 6.0
    min_words: int = 30
    max_words: int = 90
    min_output: int = 32
    max_output: int = 96
    window_s: float = 2.0  # of the peak throughput
    settle_s: float = 25.0  # at most, until the layout of an idle PengServe stands
    seed: int = 7
    engine: Mapping[str, Any] = field(default_factory=engine_flags)

    @property
    def mean_output(self) -> float:
        """Output tokens of a request, on average."""
        return (self.min_output + self.max_output) / 2

    def calibration(self, num_requests: int) -> list[Request]:
        """Requests to saturate a system with."""
        source = random.Random(f"{self.seed}/calibration")
        return [self._request(source, source, 0.0) for _ in range(num_requests)]

    def bursty(self, requests_per_s: float, system: str, round_index: int) -> list[tuple[Phase, Request]]:
        """Low, burst, low; the low load right after the burst is a phase of its own."""
        times, texts = self._sources("bursty", system, round_index)
        burst_at_s, end_s = self.low_s, self.low_s + self.burst_s
        calm_at_s = end_s + self.after_s
        spans = [
            (Phase.LOW, self.low_share, 0.0, burst_at_s),
            (Phase.BURST, self.burst_share, burst_at_s, end_s),
            (Phase.AFTER, self.low_share, end_s, calm_at_s),
            (Phase.LOW, self.low_share, calm_at_s, calm_at_s + self.low_s),
        ]
        return [
            (phase, self._request(times, texts, at_s))
            for phase, share, start_s, stop_s in spans
            for at_s in arrivals(times, share * requests_per_s, start_s, stop_s)
        ]

    def mix(self, requests_per_s: float, system: str, round_index: int) -> list[tuple[Phase, Request]]:
        """Urgent and best-effort requests at a rate that goes up and down."""
        times, texts = self._sources("mix", system, round_index)
        found, start_s = [], 0.0
        while start_s < self.mix_s:
            for share in self.mix_shares:
                stop_s = start_s + self.mix_period_s / 2
                for at_s in arrivals(times, share * requests_per_s, start_s, min(stop_s, self.mix_s)):
                    priority = URGENT if times.random() < self.urgent_share else 0
                    found.append((Phase.MIX, self._request(times, texts, at_s, priority)))
                start_s = stop_s
        return found

    def _sources(self, load: str, system: str, round_index: int) -> tuple[random.Random, random.Random]:
        name = f"{self.seed}/{load}/{round_index}"
        return random.Random(name), random.Random(f"{name}/{system}")

    def _request(self, sizes: random.Random, texts: random.Random, at_s: float, priority: int = 0) -> Request:
        num_words = sizes.randint(self.min_words, self.max_words)
        max_tokens = sizes.randint(self.min_output, self.max_output)
        return Request(prompt=text(texts, num_words), max_tokens=max_tokens, at_s=at_s, priority=priority)


def arrivals(source: random.Random, per_s: float, start_s: float, stop_s: float) -> Iterator[float]:
    """Times of a Poisson process within `[start_s, stop_s)`."""
    at_s = start_s
    while per_s > 0 and (at_s := at_s + source.expovariate(per_s)) < stop_s:
        yield at_s
