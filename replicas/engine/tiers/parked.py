"""Requests that have left the batch of their lane with their KV: by an order, or because there was no room for them.

Who is parked, and where its KV is then, `residency.py` says.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np

from pengserve.planners.preemption import LOOK_S, aged_band
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.vllm_seam import Request


class Pause(NamedTuple):
    """A request was parked, and goes on."""

    request: Request
    seconds: float
    swapped_bytes: int  # of its KV that were copied between device and host for it, of all members


class _Since(NamedTuple):
    """When a request was parked."""

    at_s: float
    copied: np.ndarray  # as `_num_copied` said then


class ParkedRequests(ABC):
    """Belongs to the step thread; of a group, its leader has one."""

    def __init__(self, scheduler: SchedulerHandle, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._scheduler, self._clock = scheduler, clock
        self._parked: dict[str, Request] = {}
        self._ordered: set[str] = set()  # parked by an order: they wait for one that resumes them
        self._since: dict[str, _Since] = {}  # of requests that have not gone on
        self._pauses: list[Pause] = []  # that `take_pauses` has not given yet
        self.num_given_up = 0

    # Orders -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def park(self, request_ids: Sequence[str]) -> list[str]:
        """Parks running requests until `resume`; those that were, or will be when a step has ended."""

    def resume(self, request_ids: Sequence[str]) -> list[str]:
        """Requests that an order parked may go on, as soon as there is room; those that may."""
        found = [request_id for request_id in request_ids if request_id in self._ordered]
        self._ordered.difference_update(found)
        return found

    @abstractmethod
    def place(self, request_id: str, layers: Sequence[int]) -> bool:
        """Full blocks of a request are on the host alone in these layers from now on; whether that can be done."""

    def is_ordered(self, request: Request) -> bool:
        """Whether an order has parked it."""
        return request.request_id in self._ordered

    def let_go(self, request: Request) -> bool:
        """The caller decides about a parked request from now on; whether it is one."""
        self._goes_on(request)
        return self._parked.pop(request.request_id, None) is not None

    def keep(self, request: Request, *, is_ordered: bool = False) -> None:
        """A request is parked from now on, if it was not; inverse of `let_go`.

        Args:
            is_ordered: until an order resumes it.
        """
        if request.request_id not in self._since:
            self._since[request.request_id] = _Since(self._clock(), self._num_copied(request))
        self._parked[request.request_id] = request
        if is_ordered:
            self._ordered.add(request.request_id)

    def choosing(self) -> AbstractContextManager[None]:
        """Around a step of vLLM's scheduler: only what there is room for is stepped."""
        return nullcontext()

    @abstractmethod
    def unsettle(self) -> None:
        """Requests have another urgency: who is stepped is chosen anew."""

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests are not here any more; unknown ids are left alone. They may come again under the same ids."""
        for request_id in request_ids:
            self._parked.pop(request_id, None)
            self._ordered.discard(request_id)
            self._since.pop(request_id, None)

    # Figures ----------------------------------------------------------------------------------------------------------

    @property
    def parked(self) -> list[Request]:
        """Parked requests."""
        return list(self._parked.values())

    def num_parked(self) -> int:
        """Of them."""
        return len(self._parked)

    @abstractmethod
    def figures(self) -> dict[str, int | float]:
        """Figures and totals, by their names in `InstanceStats`."""

    def parked_s(self, request: Request) -> float | None:
        """For how long a request has been parked; None: it is not."""
        since = self._since.get(request.request_id)
        if request.request_id not in self._parked or since is None:
            return None
        return self._clock() - since.at_s

    def has_work(self) -> bool:
        """Whether a parked request may come back without an order."""
        return any(request_id not in self._ordered for request_id in self._parked)

    def take_pauses(self) -> list[Pause]:
        """Of requests that go on since the last call."""
        found, self._pauses = self._pauses, []
        return found

    # What those that park do ------------------------------------------------------------------------------------------

    @abstractmethod
    def _hold(self, request: Request) -> None:
        """Parks a running request."""

    @abstractmethod
    def _num_copied(self, request: Request) -> np.ndarray:
        """How much of the KV that it has was copied so far, for `_swapped_bytes`."""

    @abstractmethod
    def _swapped_bytes(self, request: Request, before: np.ndarray) -> int:
        """Bytes that were copied for a parked request since `_num_copied` gave `before`, of all members."""

    def _give_up(self, request: Request) -> None:
        """A parked request loses its KV: from here on it waits as others do."""
        del self._parked[request.request_id]
        self._ordered.discard(request.request_id)
        self._goes_on(request)
        self._scheduler.preempt(request)
        self.num_given_up += 1

    def _goes_on(self, request: Request) -> None:
        since = self._since.pop(request.request_id, None)
        if since is not None:
            swapped_bytes = self._swapped_bytes(request, since.copied)
            self._pauses.append(Pause(request, self._clock() - since.at_s, swapped_bytes))

    def _waiting_for_room(self) -> list[Request]:
        """Parked requests that no order keeps."""
        return [request for request_id, request in self._parked.items() if request_id not in self._ordered]

    def _band(self, request: Request) -> int:
        """Its priority, and more urgent by the time that it has been parked."""
        since = self._since.get(request.request_id)
        if since is None or not self._scheduler.goes_by_priority:
            return request.priority
        return aged_band(request.priority, self.aged_s() - since.at_s)

    def aged_s(self) -> float:
        """When ages were looked at last: all at once, so that who has a place changes for them no oftener."""
        return self._clock() // LOOK_S * LOOK_S
