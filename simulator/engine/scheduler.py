"""What a lane of the simulation asks of its scheduler: vLLM's own, or a fast one that decides the same."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pengserve.planners.types.snapshot import KvCapacity
from pengserve.simulator.requests import LiveRequest
from pengserve.simulator.timing.steps import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step that was scheduled, or several in a row that are all the same."""

    batch: Batch
    requests: tuple[LiveRequest, ...]  # that compute in it
    max_steps: int = 1  # so many of the same may follow each other before a request ends, needs memory, or is admitted
    preempted: tuple[LiveRequest, ...] = ()  # lost their memory to make room for it
    handle: Any = None  # the scheduler's own; handed back to `finish`


class LaneScheduler(Protocol):
    """Decides what a lane computes, step by step, and owns its KV blocks. Knows nothing of time.

    Steps may overlap, as in a pipeline: `schedule` may be called again before `finish`. A request that is in an
    unfinished step is in no other, but for the following chunks of one prompt.
    """

    @property
    def capacity(self) -> KvCapacity:
        """The lane's."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks that it has now."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks that are free now, cached prefixes among them."""
        ...

    @property
    def running(self) -> Sequence[LiveRequest]:
        """Requests that hold KV, in the order in which they are scheduled."""
        ...

    @property
    def waiting(self) -> Sequence[LiveRequest]:
        """Requests that hold none, the next one first."""
        ...

    @property
    def queued_tokens(self) -> int:
        """Tokens of all waiting requests."""
        ...

    @property
    def totals(self) -> dict[str, int]:
        """Counts that only grow, by their names in `InstanceStats`."""
        ...

    def computed_tokens(self, request: LiveRequest) -> int:
        """Tokens of a running request whose KV is there."""
        ...

    def add(self, request: LiveRequest) -> None:
        """Puts a request at the end of the queue; one that has generated tokens goes before all that have none."""
        ...

    def admit(self, request: LiveRequest, computed_tokens: int) -> bool:
        """Takes a request that comes with the KV of so many tokens; False, and nothing is changed, without room."""
        ...

    def remove(self, requests: Collection[LiveRequest]) -> None:
        """Lets requests go, running or waiting; their blocks are free at once. None may be in an unfinished step."""
        ...

    def schedule(self, max_steps: int = 1) -> Step | None:
        """The next step, or as many equal ones as fit; None where there is nothing to compute now."""
        ...

    def finish(self, step: Step, num_steps: int = 1) -> list[LiveRequest]:
        """`num_steps` of a scheduled step were made: every request that was due has its tokens; those that ended.

        Counts `num_generated` up; times are for the lane to write.
        """
        ...

    def resize(self, num_blocks: int) -> bool:
        """Grows or shrinks the pool; False, and nothing is changed, where more are in use."""
        ...
