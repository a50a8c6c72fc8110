"""How many tokens of KV the requests of a trace hold, if none ever waits: what overload is measured against.

A request holds its prompt from its arrival, and one token more for each it generates, until it ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces import checks

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StayModel:
    """Seconds that a request stays: `prefill_s_per_token` of its prompt, then `tpot_s` of its output."""

    prefill_s_per_token: float
    tpot_s: float

    def __post_init__(self) -> None:
        checks.not_negative(prefill_s_per_token=self.prefill_s_per_token)
        checks.above_zero(tpot_s=self.tpot_s)

    def seconds(self, prompts: Floats, outputs: Floats) -> tuple[Floats, Floats]:
        """Until the first token, and until the end, after the arrival."""
        prefill_s = self.prefill_s_per_token * prompts
        return prefill_s, prefill_s + self.tpot_s * outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDemand:
    """Tokens of KV over a trace. The mean is over the time in which requests arrive."""

    mean_tokens: float
    peak_tokens: float
    peak_at_s: float

    @property
    def peak_over_mean(self) -> float:
        """Provisioning below this ratio overloads."""
        return self.peak_tokens / self.mean_tokens


@dataclass(frozen=True, slots=True, eq=False)
class KvCurve:
    """Demand at each moment where a request arrives, gets its first token, or ends; linear between them."""

    times_s: Floats  # sorted
    before: Floats  # tokens just before each moment
    after: Floats  # and just after it

    def at(self, times_s: Sequence[float]) -> Floats:
        """Tokens at some moments; 0 before the first request and after the last."""
        moments = np.asarray(times_s, dtype=float)
        left = np.searchsorted(self.times_s, moments, side="right") - 1
        right = np.minimum(left + 1, len(self.times_s) - 1)
        width = self.times_s[right] - self.times_s[left]
        part = np.where(width > 0, (moments - self.times_s[left]) / np.where(width > 0, width, 1.0), 0.0)
        inside = (left >= 0) & (left < len(self.times_s) - 1)
        return np.where(inside, self.after[left] * (1 - part) + self.before[right] * part, 0.0)


def demand_of(arrivals: Sequence[Arrival], stay: StayModel) -> KvDemand:
    """The demand where requests stay as `stay` says."""
    return _demand(curve_of(arrivals, stay), arrivals)


def demand_of_stays(arrivals: Sequence[Arrival], first_token_s: Sequence[float], end_s: Sequence[float]) -> KvDemand:
    """The demand where the first token and the end of each request are known, in seconds of the trace.

    Raises:
        ConfigError: a request ends before its first token, or has it before it arrives.
    """
    return _demand(curve_of_stays(arrivals, first_token_s, end_s), arrivals)


def curve_of(arrivals: Sequence[Arrival], stay: StayModel) -> KvCurve:
    """Demand over time where requests stay as `stay` says."""
    at_s, prompts, outputs = _columns(arrivals)
    first_after_s, end_after_s = stay.seconds(prompts, outputs)
    return _curve(at_s, at_s + first_after_s, at_s + end_after_s, prompts, outputs)


def curve_of_stays(arrivals: Sequence[Arrival], first_token_s: Sequence[float], end_s: Sequence[float]) -> KvCurve:
    """Demand over time where times are known, as in `demand_of_stays`."""
    at_s, prompts, outputs = _columns(arrivals)
    first, end = np.asarray(first_token_s, dtype=float), np.asarray(end_s, dtype=float)
    if not (first.shape == end.shape == at_s.shape and np.all(at_s <= first) and np.all(first <= end)):
        raise ConfigError("every request needs an arrival, a first token and an end, in this order of time")
    return _curve(at_s, first, end, prompts, outputs)


def _curve(at_s: Floats, first_s: Floats, end_s: Floats, prompts: Floats, outputs: Floats) -> KvCurve:
    decode_s = end_s - first_s
    slopes = np.where(decode_s > 0, outputs / np.where(decode_s > 0, decode_s, 1.0), 0.0)
    at_once = np.where(decode_s > 0, 0.0, outputs)
    times = np.concatenate([at_s, first_s, end_s])
    jumps = np.concatenate([prompts, at_once, -(prompts + outputs)])
    turns = np.concatenate([np.zeros_like(at_s), slopes, -slopes])
    order = np.argsort(times, kind="stable")
    times, jumps, turns = times[order], jumps[order], turns[order]
    grown = np.concatenate([[0.0], np.cumsum(turns)[:-1] * np.diff(times)])  # since the moment before
    after = np.cumsum(jumps + grown)
    return KvCurve(times, after - jumps, after)


def _demand(curve: KvCurve, arrivals: Sequence[Arrival]) -> KvDemand:
    stop_s = arrivals[-1].at_s if arrivals[-1].at_s > arrivals[0].at_s else float(curve.times_s[-1])
    width = np.diff(curve.times_s)
    tokens = (curve.after[:-1] + curve.before[1:]) / 2
    inside = curve.times_s[1:] <= stop_s
    highest = np.maximum(curve.before, curve.after)
    peak = int(np.argmax(highest))
    return KvDemand(
        mean_tokens=float((width * tokens)[inside].sum() / (stop_s - arrivals[0].at_s)),
        peak_tokens=float(highest[peak]),
        peak_at_s=float(curve.times_s[peak]),
    )


def _columns(arrivals: Sequence[Arrival]) -> tuple[Floats, Floats, Floats]:
    at_s = np.array([request.at_s for request in arrivals], dtype=float)
    prompts = np.array([request.prompt_tokens for request in arrivals], dtype=float)
    outputs = np.array([request.output_tokens for request in arrivals], dtype=float)
    return at_s, prompts, outputs
