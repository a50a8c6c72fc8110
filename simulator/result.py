"""What one simulation gave: values alone, so that reports, tests and comparisons need no simulation to be run."""

from dataclasses import dataclass

from pengserve.planners.types.events import Event
from pengserve.simulator.requests import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The cluster at one moment, as the controller's clock samples it. Sums are over all groups."""

    at_s: float
    groups: str  # the layout, e.g. "tp2@(0,1) dp@(2)"; the same string object while it does not change
    num_running: int
    num_waiting: int  # at instances
    num_unplaced: int  # at the ingress
    used_tokens: int  # of KV that running requests hold
    held_tokens: int  # of KV that all groups have room for
    demand_tokens: int  # what all requests that have arrived and not ended would hold
    generated_tokens: int  # since the moment before


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """How long streams waited between two tokens, over all requests: a histogram over the logarithm.

    Counts are of gaps in `[edges_s[i], edges_s[i + 1])`.
    """

    edges_s: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run."""

    name: str
    policy: str
    seed: int
    config: dict[str, object]  # as it was given, with defaults filled in: plain JSON data
    assumptions: tuple[str, ...]  # what had to be assumed, one sentence each: coefficients, hardware, links
    end_s: float  # virtual seconds until the last request had ended
    num_instances: int
    outcomes: tuple[Outcome, ...]  # by arrival
    moments: tuple[Moment, ...]
    gaps: Gaps
    events: tuple[Event, ...]  # the controller's log; `time_s` are virtual seconds since the start
    copied: tuple[tuple[str, float], ...] = ()  # totals of KV between device and host, by name, over all instances
    instance_kv: tuple[tuple[float, ...], ...] = ()  # share of KV in use: a row per moment, a column per instance
