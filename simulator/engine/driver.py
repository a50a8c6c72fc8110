"""What instances and switches ask of a lane that runs in virtual time, and of the owner of requests, the ingress."""

from collections.abc import Collection, Sequence
from typing import Protocol

from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.step_cost import StepTotals
from pengserve.simulator.engine.scheduler import LaneScheduler
from pengserve.simulator.requests import LiveRequest


class Driver(Protocol):
    """A lane: a scheduler, and the virtual time that its steps take."""

    @property
    def scheduler(self) -> LaneScheduler:
        """Its scheduler, to be asked. What changes it goes through the lane."""
        ...

    @property
    def work(self) -> StepTotals:
        """What its steps computed and took."""
        ...

    def admit(self, request: LiveRequest, computed_tokens: int) -> bool:
        """Takes a request with its KV; False without room."""
        ...

    def remove(self, requests: Collection[LiveRequest]) -> None:
        """Lets requests go, at the next step boundary at the latest."""
        ...

    def redirect(self, max_tokens: int) -> list[LiveRequest]:
        """Lets waiting requests go that are in no step, of so many tokens at most."""
        ...

    def resize(self, num_blocks: int) -> bool:
        """Grows or shrinks the pool; False where more blocks are in use."""
        ...

    def catch_up(self) -> None:
        """The scheduler shows what is true now."""
        ...

    def add(self, request: LiveRequest) -> None:
        """Puts a request at the end of the queue, and begins a step where nothing runs."""
        ...

    async def pause(self) -> None:
        """Returns at the next step boundary, with nothing in flight; no step begins until `resume`."""
        ...

    def resume(self) -> None:
        """Steps go on."""
        ...

    def stall(self, seconds: float) -> None:
        """No step begins for so long."""
        ...

    def close(self) -> None:
        """Its instance is gone: what is in flight never ends, and nothing is called back any more."""
        ...


class Owner(Protocol):
    """Who follows requests from place to place: the ingress."""

    def moved(self, requests: Sequence[LiveRequest], to: InstanceKey | None, *, carried: bool) -> None:
        """They have left their instance: with their KV to `to`; or they are sent again, to `to` where that fits."""
        ...

    def lost(self, key: InstanceKey, requests: Sequence[LiveRequest]) -> None:
        """Their instance is gone: they are resumed elsewhere from their tokens."""
        ...

    def ended(self, requests: Collection[LiveRequest]) -> None:
        """Their last token is there."""
        ...

    def touched(self, key: InstanceKey) -> None:
        """`key` has come up, gone, or changed its shape."""
        ...

    def stepped(self, key: InstanceKey) -> None:
        """A step has ended at `key`: it would tell another load."""
        ...
