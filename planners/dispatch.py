"""Which group gets the next request: the one with the least virtual KV load."""

from collections.abc import Sequence
from dataclasses import dataclass

from pengserve.planners.types.ids import InstanceKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A route as the dispatcher sees it. All loads are in tokens of KV."""

    key: InstanceKey
    resident_tokens: int  # KV of running requests, from the newest stats
    queued_tokens: int  # waiting requests, from the newest stats
    unseen_tokens: int  # sent by this dispatcher since those stats
    capacity_tokens: int
    num_requests: int  # running, waiting and unseen

    @property
    def virtual_load(self) -> float:
        """Resident plus queued demand as a share of the capacity; above 1 it queues or preempts."""
        return (self.resident_tokens + self.queued_tokens + self.unseen_tokens) / max(1, self.capacity_tokens)


def choose(candidates: Sequence[Candidate], num_tokens: int) -> InstanceKey | None:
    """The least loaded candidate that can ever hold `num_tokens` (prompt plus what it already generated).

    Ties go to the fewest requests, then to the lowest key, so that the same view gives the same answer.
    None where no candidate has the capacity.
    """
    able = [c for c in candidates if c.capacity_tokens >= num_tokens]
    if not able:
        return None
    return min(able, key=lambda c: (c.virtual_load, c.num_requests, c.key)).key
