"""What a pipeline has begun and its leader has not run yet: the leader has the last stage.

Blocks become free before that: a request is aborted or preempted whose microbatch is under way. New microbatches may
have such blocks, as they run after these. What does not come in that order must spare them: KV from elsewhere, weights.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from pengserve.replicas.engine.groups.step_message import ResumedRequest
from pengserve.replicas.engine.vllm_seam import SchedulerOutput


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One step of all stages."""

    output: SchedulerOutput
    is_first: bool  # the pipeline had no work before it
    forgotten: Sequence[str] = ()  # leader: requests that have left before it,
    known: Sequence[ResumedRequest] = ()  # ... and those that have come half decoded
    freed: list[int] = field(default_factory=list)  # blocks that its requests have lost since it began


def ids_of(microbatches: Iterable[Microbatch]) -> Set[str]:
    """Requests that some of these step."""
    return {request_id for other in microbatches for request_id in other.output.num_scheduled_tokens}


def spared_blocks(microbatches: Iterable[Microbatch]) -> Set[int]:
    """Blocks that the leader still reads or writes for these, though they may be free."""
    found: set[int] = set()
    for other in microbatches:
        found.update(other.freed)
    return found


def num_unwritten(microbatches: Iterable[Microbatch], request_id: str, num_computed_tokens: int) -> int:
    """Tokens of a request, of so many that the scheduler counts, whose KV the leader's stage may not have yet.

    All of them where a microbatch is under way that the request begins with: one before it may write what they share.
    """
    outputs = [other.output for other in microbatches if request_id in other.output.num_scheduled_tokens]
    if any(_begins(output, request_id) for output in outputs):
        return num_computed_tokens
    return sum(output.num_scheduled_tokens[request_id] for output in outputs)


def _begins(output: SchedulerOutput, request_id: str) -> bool:
    if any(new.req_id == request_id for new in output.scheduled_new_reqs):
        return True
    return request_id in output.scheduled_cached_reqs.resumed_req_ids
