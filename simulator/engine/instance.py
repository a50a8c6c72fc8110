"""One instance in virtual time: its dp lane, the group that it is in, and what it says of itself."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from itertools import chain
from operator import attrgetter
from typing import Any

from pengserve.planners.types.ages import ages_told
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.layout import GroupKind
from pengserve.planners.types.snapshot import (
    DeviceInfo,
    InstanceSnapshot,
    InstanceState,
    InstanceStats,
    KvCapacity,
    LaneInfo,
)
from pengserve.simulator.engine.driver import Driver
from pengserve.simulator.engine.group import SimGroup
from pengserve.simulator.engine.memory import Sizes
from pengserve.simulator.requests import LiveRequest

BuildLane = Callable[[str, KvCapacity, "tuple[SimInstance, ...]"], Driver]
"""A lane of a shape for these members, the first of which has its requests."""


class SimInstance:
    """What the production instance is to the controller: a state, lanes, stats.

    Requests are in its dp lane, in the lane of the group that it leads, or held back while it drains.
    """

    def __init__(
        self,
        key: InstanceKey,
        device: DeviceInfo,
        sizes: Sizes,
        build: BuildLane,
        lanes: tuple[LaneInfo, ...] = (),
    ) -> None:
        """`lanes` are the shapes that it was asked to be able to run; empty where it is never in a group."""
        self.key, self.device, self.sizes = key, device, sizes
        self.state = InstanceState.STARTING
        self.group: SimGroup | None = None
        self.epoch = Epoch(0)
        self.groups_ready: tuple[str, ...] = ()
        self.held: list[LiveRequest] | None = None  # new requests, while it drains for a switch
        self._lanes = lanes
        self._leaving: set[LiveRequest] = set()  # a drain waits for these
        self._drained: asyncio.Event | None = None
        self._num_requests = self._num_request_tokens = self._num_finished = self._num_finished_tokens = 0
        self._ended = Counter[str]()  # totals of lanes of groups that have ended
        self.lane = build(GroupKind.DP, sizes.dp, (self,))

    @property
    def instance_id(self) -> InstanceId:
        """Its slot."""
        return self.key.instance_id

    @property
    def is_alive(self) -> bool:
        """Whether it still answers."""
        return self.state is not InstanceState.DEAD

    @property
    def is_follower(self) -> bool:
        """Whether another instance schedules what runs here."""
        return self.group is not None and self.group.leader is not self

    @property
    def current(self) -> Driver:
        """The lane that takes requests here; of a follower its dp lane, which does not run."""
        run = self.group
        return self.lane if run is None or run.leader is not self else run.lane

    @property
    def capacity(self) -> KvCapacity:
        """Of the shape that runs here."""
        return self.sizes.dp if self.group is None else self.group.capacity

    @property
    def max_tokens(self) -> int:
        """Tokens that one request may ever have here; 0 where none may come."""
        is_open = not self.is_follower and (self.group is not None or not self.sizes.is_static)
        return self.capacity.max_model_len if is_open else 0

    # Requests ---------------------------------------------------------------------------------------------------------

    def add(self, request: LiveRequest) -> None:
        """Takes a request, which is held back while the instance drains for a switch."""
        if not request.num_moves and not request.num_generated:
            self._num_requests += 1
            self._num_request_tokens += request.num_tokens
        if self.held is not None:
            self.held.append(request)
        else:
            self.current.add(request)

    def requests(self) -> list[LiveRequest]:
        """All that are here, running ones first."""
        own = [*self.lane.scheduler.running, *self.lane.scheduler.waiting]
        groups = self.group.requests() if self.group is not None and self.group.leader is self else []
        return [*groups, *own, *(self.held or ())]

    def hold_new(self) -> None:
        """From now on, no waiting request begins; what runs goes on."""
        scheduler = self.current.scheduler
        waiting = [request for request in scheduler.waiting if not request.num_generated]
        self.current.remove(waiting)
        self.held = waiting

    def release_new(self) -> None:
        """What was held back waits for its turn again."""
        held, self.held = self.held, None
        for request in held or ():
            self.current.add(request)

    async def drained(self, requests: Collection[LiveRequest]) -> None:
        """Waits until these have ended."""
        self._leaving = {request for request in requests if not request.is_done}
        self._drained = asyncio.Event()
        if self._leaving:
            await self._drained.wait()

    def note_ended(self, requests: Collection[LiveRequest]) -> None:
        """These have ended here."""
        self._num_finished += len(requests)
        self._num_finished_tokens += sum(request.num_generated for request in requests)
        if self._leaving:
            self._leaving.difference_update(requests)
            if not self._leaving and self._drained is not None:
                self._drained.set()

    def count_ended(self, lane: Driver) -> None:
        """Totals of the lane of a group that ends stay those of its leader."""
        self._ended.update(_totals(lane))

    # What it says -----------------------------------------------------------------------------------------------------

    def load(self) -> InstanceStats:
        """What ingresses choose by, of `stats`."""
        return InstanceStats(**self._load())

    def _load(self) -> dict[str, Any]:
        capacity, run, held = self.capacity, self.group, self.held or ()
        scheduler = self.current.scheduler
        leads = run is not None and run.leader is self
        num_arriving, reserved = (len(run.arriving), run.num_reserved) if run is not None and leads else (0, 0)
        return {
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting) + len(held) + num_arriving,
            "num_holding": num_arriving,
            "kv_blocks_used": scheduler.num_blocks - scheduler.num_free + reserved,
            "queued_tokens": scheduler.queued_tokens + sum(request.num_tokens for request in held),
            "prefilling_tokens": scheduler.prefilling_tokens,
            "shape": "dp" if run is None else run.group.shape,
            "is_follower": self.is_follower,
            "block_size": capacity.block_size,
            "kv_blocks_total": capacity.num_blocks,
            "max_model_len": capacity.max_model_len,
        }

    def stats(self) -> InstanceStats:
        """Its load, as a production instance sends it after its last step."""
        run, scheduler, own = self.group, self.current.scheduler, self.lane.scheduler
        leads = run is not None and run.leader is self
        going = chain(scheduler.running, (t.request for t in run.arriving)) if run is not None and leads else ()
        preempted = [request.num_generated for request in scheduler.waiting if request.num_generated]
        return InstanceStats(
            **{**self._load(), **self._totals(), **ages_told(scheduler.running, attrgetter("num_generated"))},
            total_requests=self._num_requests,
            total_request_tokens=self._num_request_tokens,
            total_finished=self._num_finished,
            total_finished_tokens=self._num_finished_tokens,
            longest_tokens=max((r.num_tokens for r in going), default=0),
            num_paused=0 if run is None else len(own.running) + len(own.waiting),
            num_preempted=len(preempted),
            preempted_tokens=sum(preempted),
        )

    def _totals(self) -> Counter[str]:
        """Of all lanes that ever ran here: they only grow, also where the shape changes."""
        found = Counter(_totals(self.lane)) + self._ended
        if self.current is not self.lane:
            found.update(_totals(self.current))
        return found

    def snapshot(self) -> InstanceSnapshot:
        """All that it says of itself, as of its last step."""
        is_up = self.state in (InstanceState.READY, InstanceState.DRAINING)
        return InstanceSnapshot(
            key=self.key,
            state=self.state,
            endpoint=f"instance-{self.key}" if is_up else "",
            device=self.device,
            capacity=self.sizes.dp if is_up else None,
            stats=self.stats() if is_up else InstanceStats(),
            lanes=self._lanes if is_up else (),
            lane=GroupKind.DP.value if self.group is None else str(self.group.group),
            epoch=self.epoch,
            peer_endpoint=f"peer-{self.key}" if is_up and self._lanes else "",
            groups_ready=self.groups_ready,
        )


def _totals(lane: Driver) -> dict[str, int]:
    return {**lane.scheduler.totals, **lane.work.named()}
