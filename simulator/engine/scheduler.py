"""What a lane of the simulation asks of its scheduler: vLLM's own, or a fast one that decides the same."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pengserve.planners.types.errors import PlanError
from pengserve.planners.types.orders import Park, Place, Resume
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.requests import LiveRequest
from pengserve.simulator.timing.steps import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SimStep:
    """One step that was scheduled, or several in a row that are all the same."""

    batch: Batch
    requests: tuple[LiveRequest, ...]  # that compute in it
    due: tuple[LiveRequest, ...]  # of these, those that have a token when it ends: all but unfinished prompts
    max_steps: int = 1  # so many of the same may follow each other before a request ends, needs memory, or is admitted
    admitted: tuple[LiveRequest, ...] = ()  # begin with it, or go on after they had waited
    preempted: tuple[LiveRequest, ...] = ()  # lost their memory to make room for it
    swap_out_bytes: int = 0  # KV of the preempted that goes to the host before it begins
    swap_in_bytes: int = 0  # KV of the admitted that comes back from the host before it begins
    wait_s: float = 0.0  # until all that it needs at once is on the device, before it computes
    stall_s: float = 0.0  # that its layers wait for KV from the host, while it computes
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
    def options(self) -> SchedulerOptions:
        """What it is set to."""
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
    def prefilling_tokens(self) -> int:
        """Tokens of running requests' prompts that are not computed yet; those of a step under way are not."""
        ...

    @property
    def totals(self) -> dict[str, int]:
        """Counts that only grow, by their names in `InstanceStats`."""
        ...

    def computed_tokens(self, request: LiveRequest) -> int:
        """Tokens of a running request whose KV is there."""
        ...

    def cached_tokens(self, request: LiveRequest) -> int:
        """Tokens of a waiting request whose KV is in the prefix cache."""
        ...

    def blocks_freed(self, requests: Sequence[LiveRequest]) -> list[tuple[int, list[int]]]:
        """Of each of these running requests: the number of blocks that it alone holds, and the ids of those that are
        free once all of `requests` that have them have gone.
        """
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

    def schedule(self, max_steps: int = 1) -> SimStep | None:
        """The next step, or as many equal ones as fit; None where there is nothing to compute now.

        Counts `num_preemptions` up. A request that needs more blocks than the lane has waits for ever.
        """
        ...

    def finish(self, step: SimStep, num_steps: int = 1) -> list[LiveRequest]:
        """`num_steps` of a scheduled step were made: every request that was due has its tokens; those that ended.

        Counts `num_generated` up; times are for the lane to write.
        """
        ...

    def resize(self, num_blocks: int) -> bool:
        """Grows or shrinks the pool; False, and nothing is changed, where more are in use."""
        ...


@runtime_checkable
class CountsCopies(Protocol):
    """A scheduler whose lane copies KV between device and host."""

    def copied(self) -> Mapping[str, float]:
        """Totals by name: bytes, blocks, calls, seconds."""
        ...


@runtime_checkable
class KeepsStepsShort(Protocol):
    """A scheduler whose steps can be kept short, as members of a switch wait for their end."""

    def keep_steps_short(self, is_on: bool) -> None:
        """Whether all steps from now on read little of prompts."""
        ...


@runtime_checkable
class TakesOrders(Protocol):
    """A scheduler whose requests can be parked, resumed and placed by order. Between two steps."""

    def take_orders(self, orders: Sequence[Park | Resume | Place]) -> None:
        """Carries out those that are new."""
        ...


def check_fits(request: LiveRequest, capacity: KvCapacity) -> None:
    """Raises PlanError where a request would get longer than the lane can hold."""
    tokens = request.arrival.prompt_tokens + request.arrival.output_tokens
    if tokens > capacity.max_model_len:
        raise PlanError(
            f"request {request.request_id} gets {tokens} tokens long, and the lane holds {capacity.max_model_len}:"
            " refuse it before it is sent here"
        )
    if request.is_done:
        raise PlanError(f"request {request.request_id} has all its tokens: it must not be sent anywhere")


def check_admitted(request: LiveRequest, computed_tokens: int) -> None:
    """Raises PlanError where a request cannot come with the KV of so many tokens."""
    if not 0 < computed_tokens < request.num_tokens:
        raise PlanError(
            f"request {request.request_id} of {request.num_tokens} tokens cannot come with the KV of {computed_tokens}:"
            " at least one token must be computed, and one not"
        )
