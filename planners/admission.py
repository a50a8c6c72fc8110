"""Whether an ingress may take one more request, before anything of the answer is sent."""

import math
from dataclasses import dataclass
from enum import StrEnum

MIN_RETRY_S = 1
MAX_RETRY_S = 60


class Refusal(StrEnum):
    """Why a request is not taken."""

    OVERLOAD = "overload"  # all slots and the queue are full
    DRAINING = "no_instance"  # the application is going away


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressLoad:
    """One ingress's view at one moment. Counts are sequences: a request with n choices counts n."""

    num_in_flight: int  # taken and not yet answered
    num_slots: int  # sequences that all ready instances can run at once
    num_ingresses: int  # ingresses that share those slots
    max_queued: int  # sequences that may wait beyond the slots
    finished_per_s: float  # how fast sequences ended lately; 0 where unknown
    is_draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Taken where `refusal` is None; else when to try again."""

    refusal: Refusal | None = None
    retry_after_s: int = 0


def admit(load: IngressLoad, num_sequences: int) -> Admission:
    """Decides on a request of `num_sequences` sequences.

    The bound is this ingress's share of the running slots plus the queue. A client is told to come back when about
    half of what is in flight has ended, between `MIN_RETRY_S` and `MAX_RETRY_S`.
    """
    if load.is_draining:
        return Admission(refusal=Refusal.DRAINING, retry_after_s=MIN_RETRY_S)
    limit = math.ceil(load.num_slots / max(1, load.num_ingresses)) + load.max_queued
    if load.num_in_flight + num_sequences <= limit:
        return Admission()
    slowest_per_s = load.num_in_flight / 2 / MAX_RETRY_S  # slower than this, and it is MAX_RETRY_S
    wait_s = float(MIN_RETRY_S)
    if load.finished_per_s > 0:
        wait_s = load.num_in_flight / 2 / max(load.finished_per_s, slowest_per_s)
    return Admission(refusal=Refusal.OVERLOAD, retry_after_s=min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(wait_s))))
