"""In which order requests of a pipeline leave its devices and come back, where not all of their KV fits."""

from collections.abc import Sequence
from typing import Any, Protocol

from pengserve.replicas.engine.vllm_seam import Request

Rank = tuple[Any, ...]


class SwapOrder(Protocol):
    """A policy. `band`: how urgent a request is with its ageing, the least first."""

    def leaving(self, request: Request, band: int, *, is_coming: bool) -> Rank:
        """The greatest leaves first. `is_coming`: its KV is on its way back."""

    def coming(self, request: Request, band: int) -> Rank:
        """Of parked requests the least comes back first."""

    def waits_for(self, others: Sequence[Request], victim: Request, band: int) -> bool:
        """Whether `victim` stays, because one of `others`, which are in microbatches, is to leave instead."""

    def making_way(self, request: Request, running: Sequence[Request]) -> Sequence[Request]:
        """Those that may leave so that a parked request comes back, the first one first."""

    def made_way(self, request: Request, num_gone: int) -> None:
        """So many have left for a parked request."""

    def came_back(self, request: Request) -> None:
        """A parked request goes on."""


class ByAge:
    """The youngest leave first and come back last, and none makes way: little is copied, and the oldest goes on."""

    def leaving(self, request: Request, band: int, *, is_coming: bool) -> Rank:
        """What is coming has its place, as what runs has: its blocks are of use only when its copies have ended."""
        return band, not is_coming, request.arrival_time, request.request_id

    def coming(self, request: Request, band: int) -> Rank:
        """The oldest of the most urgent."""
        return band, request.arrival_time, request.request_id

    def waits_for(self, others: Sequence[Request], victim: Request, band: int) -> bool:
        """For the less urgent."""
        return any(other.priority > band for other in others)

    def making_way(self, request: Request, running: Sequence[Request]) -> Sequence[Request]:
        """None."""
        return ()

    def made_way(self, request: Request, num_gone: int) -> None:
        """Nothing to note."""

    def came_back(self, request: Request) -> None:
        """Nothing to note."""
