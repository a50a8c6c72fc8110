"""What a client may hold the cluster to: latencies (SLO), service class, priority, tenant and session of one request.

The ingress reads a `Contract` from a request's body and headers, fills it up from its class, and sends it along with
the request. Planners read it where they decide about requests. All times here are in seconds; clients give
milliseconds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

DEFAULT_CLASS = "default"


class SloPolicy(StrEnum):
    """What becomes of a request whose SLO is predicted to be missed."""

    BEST_EFFORT = "best_effort"  # it is served late, behind those that can be in time, and the miss is counted
    REJECT = "reject"  # it is refused at admission, with the TTFT that was predicted


class Pacing(StrEnum):
    """When tokens that are computed go to the client."""

    NONE = "none"  # at once
    STEADY = "steady"  # one in each `tbt_s`, while more are there; what is finished goes at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latencies that a request is to keep. At least one of the two times is set."""

    ttft_s: float | None = None  # from arrival at the ingress to the first token
    tbt_s: float | None = None  # between two tokens
    policy: SloPolicy = SloPolicy.BEST_EFFORT
    pacing: Pacing = Pacing.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """A class of requests, as configured. Lower priorities are more urgent, as in vLLM."""

    name: str
    slo: Slo | None = None  # of requests that bring none
    priority: int = 0  # of requests that bring none
    min_priority: int | None = None  # the most urgent that a request may ask for; None: no limit
    max_priority: int | None = None  # ... and the least
    weight: float = 1.0  # of its share beyond what is guaranteed
    guaranteed_share: float = 0.0  # of the cluster's time, while requests of it wait

    def allows(self, priority: int) -> bool:
        """Whether a request of this class may have `priority`."""
        above = self.min_priority is None or priority >= self.min_priority
        return above and (self.max_priority is None or priority <= self.max_priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What holds for one request: what it asked for, and the rest from its class."""

    service_class: str = DEFAULT_CLASS
    priority: int = 0
    slo: Slo | None = None
    queue_limit_s: float | None = None  # the longest wait for its first token; then it is given up
    tenant: str = ""  # whose share it is served from; "": of none
    session: str = ""  # requests of one are best served where its last one was; "": of none
    # What its ingress predicts of the answer where there is an SLO: tokens in all, as a conservative bound and as the
    # median. 0: nothing is predicted.
    low_tokens: int = 0
    median_tokens: int = 0
    waited_s: float = 0.0  # where there is an SLO: from its arrival at the ingress until it was sent to an instance


NO_CONTRACT = Contract()
"""Of a request that asks for nothing, in a cluster without classes and keys."""

BUILT_IN_CLASSES: Mapping[str, ServiceClass] = {
    found.name: found
    for found in (
        ServiceClass(name=DEFAULT_CLASS),
        ServiceClass(name="flex", priority=1, min_priority=0, weight=0.5),
        ServiceClass(name="priority", priority=-1, weight=2.0),
    )
}
"""OpenAI's service tiers, as far as settings leave them as they are."""


def by_name(classes: Iterable[ServiceClass]) -> dict[str, ServiceClass]:
    """The built-in classes, with `classes` in place of those of the same names and beside the others."""
    return {**BUILT_IN_CLASSES, **{found.name: found for found in classes}}
