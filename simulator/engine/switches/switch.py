"""One switch under way: who takes part, what it may use, and how it ends where something breaks."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pengserve.planners.stages import Parts
from pengserve.planners.types.ids import Epoch
from pengserve.planners.types.layout import Group
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.simulator.engine.driver import Driver, Owner
from pengserve.simulator.engine.group import SimGroup, SimTraveller, end_group
from pengserve.simulator.engine.instance import SimInstance
from pengserve.simulator.engine.scheduler import KeepsStepsShort, LaneScheduler
from pengserve.simulator.requests import LiveRequest
from pengserve.simulator.timing.switches import SwitchCosts

Pair = tuple[int, int]  # ranks: from, to


class Network(Protocol):
    """Links between instances."""

    async def send(self, source: SimInstance, target: SimInstance, num_bytes: int, *, is_weights: bool) -> None:
        """Returns when the bytes have come; KV goes first where links are shared, weights have what is left."""
        ...


class Surroundings(Protocol):
    """What a switch needs of the cluster."""

    @property
    def costs(self) -> SwitchCosts: ...

    @property
    def network(self) -> Network: ...

    @property
    def owner(self) -> Owner: ...

    def group_lane(self, group: Group, members: tuple[SimInstance, ...], capacity: KvCapacity) -> Driver:
        """A lane for a group, with no requests and all of its blocks."""
        ...


@dataclass(eq=False, kw_only=True)
class SimSwitch:
    """State that the kinds of switches share."""

    plan: SwitchPlan
    members: tuple[SimInstance, ...]
    around: Surroundings
    runs: list[SimGroup] = field(default_factory=list)  # that begin and are not entered yet
    may_end: bool = True  # nothing has moved yet: it can be called off
    sent_bytes: int = 0
    kept: frozenset[object] = field(default_factory=frozenset)

    @property
    def leader(self) -> SimInstance:
        """Who commits."""
        return self.members[0]

    @property
    def epoch(self) -> Epoch:
        """That it leads to."""
        return Epoch(self.plan.epoch + 1)

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return self.leader.sizes.dp_token_bytes

    @property
    def parts(self) -> Parts:
        """What a group is formed of, or ends in."""
        return Parts(self.leader.sizes.num_layers, tuple(part.degree for part in self.plan.parts))

    @property
    def remap_s(self) -> float:
        """Seconds in which the member that drops most layers turns their weights into KV, or back."""
        sizes = self.leader.sizes
        num_layers = sizes.remapped_layers(self.parts)
        return self.around.costs.remap_s(num_layers * sizes.layer_bytes, num_layers)

    async def meet(self) -> float:
        """All members stop at a step boundary; the leader goes on in short steps until the others have. Seconds that
        took.

        Of groups that become one, their leaders' lanes are what stops.
        """
        loop, scheduler = asyncio.get_running_loop(), self.leader.current.scheduler
        started_s = loop.time()
        try:
            _keep_short(scheduler, True)
            await asyncio.gather(*(member.current.pause() for member in self.members[1:]))
            await self.leader.current.pause()
        finally:
            _keep_short(scheduler, False)
        self.may_end = False
        for member in self.members:
            if member.held is not None:
                member.release_new()
        return loop.time() - started_s

    async def begin_group(self, group: Group | None = None) -> SimGroup:
        """The group that this switch forms, or a part that it ends in; no member has entered it yet."""
        group = group or self.plan.group
        members = tuple(member for member in self.members if member.instance_id in group.members)
        capacity = self.leader.sizes.lane(group.shape)
        lane = self.around.group_lane(group, members, capacity)
        await lane.pause()
        run = SimGroup(group=group, members=members, lane=lane, capacity=capacity)
        self.runs.append(run)
        return run

    def leave_parts(self) -> list[LiveRequest]:
        """The groups that become a wider one end; the requests that are left in them."""
        runs = {id(member.group): member.group for member in self.members if member.group is not None}
        return [request for run in runs.values() for request in end_group(run)]

    def enter_group(self, run: SimGroup) -> None:
        """From now on its members run the group."""
        self.runs.remove(run)
        for member in run.members:
            member.group = run
            member.epoch = self.epoch
            self.around.owner.touched(member.key)
        run.lane.resume()

    def leave_group(self) -> None:
        """From now on the members that are in no part that is a group are alone."""
        for member in (member for member in self.members if member.group is None):
            member.epoch = self.epoch
            member.lane.resume()
            self.around.owner.touched(member.key)

    async def send(self, pairs: Mapping[Pair, int], *, is_weights: bool = False) -> None:
        """Sends so many bytes from rank to rank, all at once, and returns when all have come."""
        self.sent_bytes += sum(pairs.values())
        network, members = self.around.network, self.members
        async with asyncio.TaskGroup() as group:
            for (source, target), num_bytes in sorted(pairs.items()):
                if num_bytes > 0 and source != target:
                    work = network.send(members[source], members[target], num_bytes, is_weights=is_weights)
                    group.create_task(work)

    def undo(self) -> None:
        """After a failure: living members go on as before, or alone; requests that had begun to move are sent again."""
        runs, self.runs = self.runs, []
        for run in runs:
            requests = run.requests()
            run.close()
            self.around.owner.moved(requests, None, carried=False)
        for member in self.members:
            if member.is_alive:
                if member.held is not None:
                    member.release_new()
                if member.group is None:
                    member.lane.resume()
                elif not member.is_follower:
                    member.current.resume()
                self.around.owner.touched(member.key)


def _keep_short(scheduler: LaneScheduler, is_on: bool) -> None:
    if isinstance(scheduler, KeepsStepsShort):
        scheduler.keep_steps_short(is_on)


def by_head(travellers: list[SimTraveller], parts: Parts, token_bytes: int, *, is_merge: bool) -> dict[Pair, int]:
    """Bytes of KV that change member where requests are re-sharded by head: all but what a member has and keeps.

    A traveller's rank is that of who leads its part, whose members have a share of the heads each.
    """
    pairs: dict[Pair, int] = {}
    num_members = sum(parts.sizes)
    for traveller in travellers:
        share = traveller.num_tokens * token_bytes // num_members
        size = parts.sizes[parts.of(traveller.rank)]
        for other in range(num_members):
            mate = traveller.rank + other * size // num_members
            if other != mate:
                pair = (mate, other) if is_merge else (other, mate)
                pairs[pair] = pairs.get(pair, 0) + share
    return pairs


def by_layer(travellers: list[SimTraveller], parts: Parts, token_bytes: int, *, is_drop: bool) -> dict[Pair, int]:
    """Bytes of KV that change member where each part of a pipeline has all layers of its requests.

    A traveller's rank is that of who leads its part: before a drop, after a restore.
    """
    pairs: dict[Pair, int] = {}
    for traveller in travellers:
        own = parts.of(traveller.rank)
        mates = range(traveller.rank, traveller.rank + parts.sizes[own])
        for other in range(sum(parts.sizes)):
            for mate in mates if parts.of(other) != own else ():
                num_layers = shared_layers(parts, mate, other)
                if num_layers:
                    pair = (mate, other) if is_drop else (other, mate)
                    share = traveller.num_tokens * token_bytes * num_layers // parts.num_layers
                    pairs[pair] = pairs.get(pair, 0) + share
    return pairs


def shared_layers(parts: Parts, mate: int, other: int) -> int:
    """Layers that rank `mate` has in its part, and `other` in the pipeline of all."""
    (first, stop), (low, high) = parts.layers(mate), parts.wide_layers(other)
    return max(0, min(stop, high) - max(first, low))
