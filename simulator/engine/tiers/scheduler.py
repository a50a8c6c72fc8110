"""A lane's scheduler whose KV has a host tier: vLLM's, production's `ResidentRequests`, and virtual time for copies.

Who is stepped, who is parked, what leaves the device and what comes back, production's own code decides. A step waits
for what it needs first (`wait_s`), and its layers for what is staged (`stall_s`, OrbitFlow's Algorithm 1).
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pengserve.planners.placement.latency import stall_s
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.orders import Park, Place, Resume
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.engine.tiers.lane_tiers import LaneTiers
from pengserve.replicas.engine.tiers.residency import ResidentRequests
from pengserve.replicas.engine.vllm_seam import SchedulerOutput
from pengserve.replicas.parking import ParkOrders
from pengserve.simulator.engine.memory import Tiers
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.scheduler import SimStep
from pengserve.simulator.engine.tiers.virtual import VirtualTiers
from pengserve.simulator.engine.vllm_scheduler import VllmScheduler
from pengserve.simulator.requests import LiveRequest
from pengserve.simulator.timing.steps import StepTimes


class TieredScheduler(VllmScheduler):
    """A `LaneScheduler` of an instance that works alone."""

    def __init__(
        self,
        capacity: KvCapacity,
        options: SchedulerOptions,
        tiers: Tiers,
        times: StepTimes,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            capacity: in logical blocks.
            times: of steps, without any stall.
            clock: virtual seconds.
        """
        super().__init__(capacity, options, clock)
        self.tiers = VirtualTiers(
            num_layers=tiers.num_layers,
            device_blocks=tiers.device_blocks,
            host_blocks=tiers.host_blocks,
            num_blocks=capacity.num_blocks + 1,
            block_size=capacity.block_size,
            block_bytes=tiers.block_bytes,
            bytes_per_s=tiers.bytes_per_s,
            clock=clock,
        )
        num_reserved = max(0, capacity.num_blocks - tiers.host_blocks)
        self.tiers.watch_uses(self._scheduler.uses)
        self.residency = ResidentRequests(self._scheduler, LaneTiers(self.tiers), num_reserved, self, clock)
        self._orders = ParkOrders(InstanceKey(instance_id=InstanceId(0), incarnation=1))  # `SimCluster` knows whose
        self._times, self._clock = times, clock
        self._open = contextlib.ExitStack()  # what a step began, until it ends
        # Cells by layer in the present step, and those that they take turns in.
        self._staged: tuple[list[int], int] = ([], 0)
        self.stalled_s = 0.0

    @property
    def waiting(self) -> Sequence[LiveRequest]:
        """Parked requests, which production counts as waiting, and those that hold no KV."""
        parked = [self._lives[request.request_id] for request in self.residency.parked]
        return [*parked, *super().waiting]

    def num_used(self) -> int:
        """Blocks that requests hold."""
        return self.capacity.num_blocks - self.num_free

    def num_available(self) -> int:
        """Free blocks: an instance that works alone leases none."""
        return self.num_free

    def schedule(self, max_steps: int = 1) -> SimStep | None:
        """As `VllmScheduler`. Where all that could be stepped waits for copies, so does the step."""
        before_s, num_given_up = self._now_s(), self.residency.num_given_up
        step = super().schedule(max_steps)
        while step is None and self.residency.has_work():
            next_s = self.tiers.link.next_end_s()
            if next_s is None:
                return None
            self.tiers.link.go_on_to(next_s)
            step = super().schedule(max_steps)
        self._preempted += self.residency.num_given_up - num_given_up
        if step is None:
            return None
        wait_s = max(0.0, self.tiers.link.now_s - before_s)
        return replace(step, wait_s=wait_s, stall_s=self._stall_s(step))

    def finish(self, step: SimStep, num_steps: int = 1) -> list[LiveRequest]:
        """As `VllmScheduler`; what was staged stays where there is room, and prompts are written behind."""
        self._end_tiers()
        return super().finish(step, num_steps)

    def take_orders(self, orders: Sequence[Park | Resume | Place]) -> None:
        """As production's instance does: each order once, one after the other."""
        self._end_tiers()
        self._orders.take(orders, self.residency)

    def copied(self) -> dict[str, float]:
        """Totals of the host tier, as `InstanceStats` names them."""
        found = {name: value for name, value in self.residency.figures().items() if name.startswith("total_")}
        return {**found, "stalled_s": self.stalled_s}

    def _form(self) -> SchedulerOutput:
        self._end_tiers()
        if self.residency.has_to_choose():
            self._open.enter_context(self.residency.step())
        output = super()._form()
        if output.num_scheduled_tokens:
            self._begin_tiers(output)
        return output

    def _begin_tiers(self, output: SchedulerOutput) -> None:
        size, handle = self.capacity.block_size, self._scheduler
        ids = list(output.num_scheduled_tokens)
        stops = np.array([handle.request(request_id).num_computed_tokens for request_id in ids])
        starts = stops - np.array([output.num_scheduled_tokens[request_id] for request_id in ids])
        if len(ids) == stops.sum() - starts.sum() and self.tiers.placement.is_plain and (starts % size).all():
            return  # as in production: each writes one token into a block that it has
        blocks = [handle.block_ids(request_id) for request_id in ids]
        for new in output.scheduled_new_reqs:
            if num_hit := new.num_computed_tokens // size:
                self.tiers.note_hits(np.array(blocks[ids.index(new.req_id)][:num_hit]), size)
        tables = np.zeros((len(ids), max(map(len, blocks))), dtype=np.int64)
        for row, found in zip(tables, blocks, strict=True):
            row[: len(found)] = found
        step = self.tiers.begin_step(tables, -(-stops // size), starts)
        self._staged = self.tiers.stage_all() if step is not None else ([], 0)
        if self._staged[0]:
            self._open.callback(self.tiers.end_step)

    def _stall_s(self, step: SimStep) -> float:
        staged, num_free = self._staged
        if not staged:
            return 0.0
        link, num_layers = self.tiers.link, self.tiers.pool.num_layers
        layer_s = self._times.step_s(step.batch) / num_layers
        found = stall_s(staged, layer_s, link.rate / link.block_bytes, num_free)
        self.stalled_s += found
        return found

    def _end_tiers(self) -> None:
        self._staged = ([], 0)
        self._open.close()

    def _now_s(self) -> float:
        return self._clock()
