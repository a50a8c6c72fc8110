"""A tp or pp group that runs: its lane, its members, and the requests whose KV is still on its way."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pengserve.planners.types.layout import Group
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.planners.types.units import blocks_for
from pengserve.simulator.engine.driver import Driver
from pengserve.simulator.requests import LiveRequest

if TYPE_CHECKING:
    from pengserve.simulator.engine.instance import SimInstance


@dataclass(frozen=True, slots=True)
class SimTraveller:
    """A running request and the tokens of its KV, on the way from one lane to another."""

    request: LiveRequest
    rank: int  # of the member that has its KV, or that it goes to
    num_tokens: int


@dataclass(eq=False, kw_only=True)
class SimGroup:
    """One group from its merge or drop to its end. The first member leads."""

    group: Group
    members: tuple["SimInstance", ...]
    lane: Driver
    capacity: KvCapacity
    arriving: list[SimTraveller] = field(default_factory=list)  # after a drop: their KV is on its way
    is_exchanging: bool = False
    exchange: asyncio.Task[None] | None = None

    @property
    def leader(self) -> "SimInstance":
        """Who has its requests."""
        return self.members[0]

    @property
    def num_reserved(self) -> int:
        """Blocks of the requests that are on their way; the scheduler does not have them."""
        return sum(self.blocks_needed(traveller.num_tokens) for traveller in self.arriving)

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks for a request with KV of so many tokens, and its next one."""
        return blocks_for(num_tokens + 1, self.capacity.block_size)

    def requests(self) -> list[LiveRequest]:
        """All that are in its hands, running ones first."""
        scheduler = self.lane.scheduler
        return [*scheduler.running, *(t.request for t in self.arriving), *scheduler.waiting]

    def close(self) -> None:
        """It runs no more. Its requests are the caller's to take care of."""
        self.lane.close()
        if self.exchange is not None:
            self.exchange.cancel()


def end_group(run: SimGroup) -> Sequence[LiveRequest]:
    """Takes all members out of the group. Returns its requests, which no lane holds any more."""
    requests = run.requests()
    run.close()
    run.leader.count_ended(run.lane)
    for member in run.members:
        member.group = None
    return requests
