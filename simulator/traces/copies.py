"""Copies of requests: other users who do the same."""

import dataclasses
from collections.abc import Iterable, Sequence

from pengserve.simulator.requests import Arrival


class Copier:
    """Copies requests of one trace, each under a name that no other one has.

    A copy shares its prefixes with the copies of the same number alone: were they shared with the original, a prefix
    cache would serve the added load for nothing.
    """

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._mark = "x"
        while any(self._mark in request.request_id for request in arrivals):
            self._mark += "x"
        self._num_ids = 1 + max((max(request.prefix_ids, default=-1) for request in arrivals), default=-1)

    def copy(self, request: Arrival, number: int, at_s: float) -> Arrival:
        """The request at another time; number 0 is itself."""
        if number == 0:
            return dataclasses.replace(request, at_s=round(at_s, 6))
        shift = number * self._num_ids
        return dataclasses.replace(
            request,
            request_id=f"{request.request_id}{self._mark}{number}",
            at_s=round(at_s, 6),
            prefix_ids=tuple(block_id + shift for block_id in request.prefix_ids),
        )


def by_time(arrivals: Iterable[Arrival]) -> tuple[Arrival, ...]:
    """Requests as a trace; those that arrive together stay as they are."""
    return tuple(sorted(arrivals, key=lambda request: request.at_s))
