"""What a system made of a workload: effective throughput, attainment, fairness, and what context switches cost.

An outcome is one line a request, in the order of the workload's requests:

    {"tenant": "tenant-1", "priority": 2, "sent_s": 0.5, "token_s": [0.71, 0.73, ...], "error": ""}

Times are seconds after the start. `token_s` is when each token, or batch of tokens, came.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0  # of VTC's service (Sheng et al.): a token of a prompt, and of an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request must keep to count as well served."""

    ttft_s: float = 2.0
    tbt_s: float = 0.2  # of 99 % of its gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Of some requests."""

    requests: int
    failed: int
    tokens_per_s: float  # of answers
    effective_tokens_per_s: float  # of those of requests that kept their limits
    attainment: float  # share of the requests that did
    ttft_p50_s: float
    ttft_p99_s: float
    tbt_p50_s: float
    tbt_p99_s: float
    tbt_p999_s: float
    paused_s: float  # of gaps beyond the limit of TBT, what is beyond it: over all requests
    jain: float  # of what tenants that asked for enough were served, 1: alike
    swapped_bytes: int = 0  # as the system counted


def score(outcomes: Sequence[Mapping[str, Any]], prompts: Sequence[int], limits: Limits, swapped: int = 0) -> Score:
    """Args:
    prompts: tokens of each request's prompt.
    """
    ttfts, gaps, kept_tokens, tokens, kept, paused_s = [], [], 0, 0, 0, 0.0
    last_s, first_s = 0.0, math.inf
    for outcome in outcomes:
        times = outcome["token_s"]
        first_s = min(first_s, outcome["sent_s"])
        if not times:
            continue
        own = [later - earlier for earlier, later in itertools.pairwise(times)]
        ttft_s = times[0] - outcome["sent_s"]
        ttfts.append(ttft_s)
        gaps += own
        paused_s += sum(max(0.0, gap - limits.tbt_s) for gap in own)
        tokens += len(times)
        last_s = max(last_s, times[-1])
        if not outcome.get("error") and ttft_s <= limits.ttft_s and percentile(own, 0.99) <= limits.tbt_s:
            kept += 1
            kept_tokens += len(times)
    span_s = max(1e-9, last_s - first_s)
    return Score(
        requests=len(outcomes),
        failed=sum(bool(outcome.get("error")) or not outcome["token_s"] for outcome in outcomes),
        tokens_per_s=tokens / span_s,
        effective_tokens_per_s=kept_tokens / span_s,
        attainment=kept / max(1, len(outcomes)),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p99_s=percentile(ttfts, 0.99),
        tbt_p50_s=percentile(gaps, 0.5),
        tbt_p99_s=percentile(gaps, 0.99),
        tbt_p999_s=percentile(gaps, 0.999),
        paused_s=paused_s,
        jain=jain(satisfaction(outcomes, prompts).values()),
        swapped_bytes=swapped,
    )


def satisfaction(outcomes: Sequence[Mapping[str, Any]], prompts: Sequence[int]) -> dict[str, float]:
    """By tenant: service per second of the time in which at least one of its requests was there, waiting or served.

    A tenant whose requests wait behind another's has less; one that only waits behind its own does not.
    """
    service: dict[str, float] = {}
    spans: dict[str, list[tuple[float, float]]] = {}
    for outcome, prompt in zip(outcomes, prompts, strict=True):
        tenant, times = outcome["tenant"], outcome["token_s"]
        if not times:
            continue
        service[tenant] = service.get(tenant, 0.0) + PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * len(times)
        spans.setdefault(tenant, []).append((outcome["sent_s"], times[-1]))
    return {tenant: service[tenant] / max(1e-9, covered_s(spans[tenant])) for tenant in service}


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of these spans `(start, stop)`."""
    total_s, until_s = 0.0, -math.inf
    for start_s, stop_s in sorted(spans):
        total_s += max(0.0, stop_s - max(start_s, until_s))
        until_s = max(until_s, stop_s)
    return total_s


def jain(values: Iterable[float]) -> float:
    """Jain's index: 1 where all are alike, 1/n where one has everything."""
    found = list(values)
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 1.0


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so many are not above; 0 where there are none."""
    found = sorted(values)
    return found[min(len(found) - 1, math.ceil(share * len(found)) - 1)] if found else 0.0
