"""Results made by hand, so that reports are tested without a simulation."""

import random
from typing import Any

from pengserve.planners.types.events import Event, EventKind
from pengserve.simulator.requests import Outcome
from pengserve.simulator.result import Gaps, Moment, Result

DP, PP = "dp@(0) dp@(1) dp@(2) dp@(3)", "pp2@(0,1) dp@(2) dp@(3)"


def outcome(number: int, **changes: Any) -> Outcome:
    """A request that arrived at second `number`, got its first token after 0.5 s and 11 tokens within 2.5 s."""
    given: dict[str, Any] = {
        "request_id": f"r{number}",
        "arrived_s": float(number),
        "prompt_tokens": 100,
        "output_tokens": 11,
        "scheduled_s": number + 0.25,
        "first_token_s": number + 0.5,
        "end_s": number + 2.5,
        "longest_gap_s": 0.3,
        "num_preemptions": 0,
        "num_moves": 0,
    }
    return Outcome(**{**given, **changes})


def moment(at_s: float, **changes: Any) -> Moment:
    """Half of the room in use, all alone."""
    given: dict[str, Any] = {
        "at_s": at_s,
        "groups": DP,
        "num_running": 3,
        "num_waiting": 1,
        "num_unplaced": 0,
        "used_tokens": 500,
        "held_tokens": 1000,
        "demand_tokens": 800,
        "generated_tokens": 40,
    }
    return Moment(**{**given, **changes})


def result(**changes: Any) -> Result:
    """A run of ten requests on four instances, with one drop from second 4 to second 6."""
    given: dict[str, Any] = {
        "name": "by hand",
        "policy": "pengserve",
        "seed": 7,
        "config": {"trace": {"generator": "poisson"}, "cluster": {"instances": 4}},
        "assumptions": ("Links are never contended.",),
        "end_s": 12.0,
        "num_instances": 4,
        "outcomes": tuple(outcome(number) for number in range(10)),
        "moments": tuple(moment(float(at), groups=PP if 4 <= at < 6 else DP) for at in range(12)),
        "gaps": Gaps(edges_s=(0.01, 0.1, 1.0), counts=(90, 10)),
        "events": (Event(seq=1, time_s=4.0, kind=EventKind.TRANSITION_END, why="full", data={"b": 1, "a": [2]}),),
        "instance_kv": tuple((0.1, 0.5, 0.9, 1.0) for _ in range(12)),
    }
    return Result(**{**given, **changes})


def large_result(num_requests: int = 20_000, end_s: float = 3600.0, seed: int = 0, **changes: Any) -> Result:
    """An hour of random traffic that overflows in the middle. `seed` alone decides."""
    rng = random.Random(seed)
    arrivals = sorted(rng.uniform(0, end_s - 60) for _ in range(num_requests))
    outcomes = []
    for number, at_s in enumerate(arrivals):
        busy = 20.0 if 0.4 < at_s / end_s < 0.5 else 1.0
        ttft_s, tpot_s = rng.lognormvariate(-1.5, 0.7) * busy, rng.lognormvariate(-3.5, 0.3)
        tokens = rng.randint(2, 600)
        first_s = at_s + ttft_s
        outcomes.append(
            outcome(number, arrived_s=at_s, prompt_tokens=rng.randint(10, 4000), output_tokens=tokens,
                    scheduled_s=at_s + ttft_s / 2, first_token_s=first_s, end_s=first_s + tpot_s * (tokens - 1))
        )  # fmt: skip
    moments, kv = [], []
    for step in range(int(end_s)):
        is_busy = 0.4 < step / end_s < 0.5
        load = 1.4 if is_busy else 0.5 + 0.2 * rng.random()
        room = 1.6e6 if is_busy and step % 90 > 20 else 1e6
        moments.append(
            moment(float(step), groups=PP if room > 1e6 else DP, num_running=int(60 * load),
                   num_waiting=int(is_busy) * 40, num_unplaced=int(is_busy) * 5,
                   used_tokens=int(min(load * 1e6, room)), held_tokens=int(room),
                   demand_tokens=int(load * 1e6), generated_tokens=900)
        )  # fmt: skip
        kv.append(tuple(min(1.0, load * rng.uniform(0.5, 1.0)) for _ in range(4)))
    edges = tuple(1e-3 * 10 ** (index / 10) for index in range(51))
    counts = tuple(int(1e6 * 2.718 ** (-((index - 14) ** 2) / 9)) for index in range(50))
    return result(
        **{
            "outcomes": tuple(outcomes), "moments": tuple(moments), "end_s": end_s, "instance_kv": tuple(kv),
            "gaps": Gaps(edges_s=edges, counts=counts), **changes,
        }
    )  # fmt: skip
