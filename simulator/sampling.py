"""The cluster at regular moments."""

import asyncio

from pengserve.controller.loop import Controller
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Layout
from pengserve.simulator.engine.cluster import SimCluster
from pengserve.simulator.engine.instance import SimInstance
from pengserve.simulator.ingress import SimIngress
from pengserve.simulator.outcomes import Outcomes
from pengserve.simulator.result import Moment


class Sampler:
    """Takes `Moment`s. At most one for each moment: a second one in its place is left out."""

    def __init__(self, cluster: SimCluster, ingress: SimIngress, controller: Controller, outcomes: Outcomes) -> None:
        self.moments: list[Moment] = []
        self.instance_kv: list[tuple[float, ...]] = []
        self.num_generated = 0
        self._cluster, self._ingress, self._controller, self._outcomes = cluster, ingress, controller, outcomes
        self._layout: Layout | None = None
        self._groups = ""

    def take(self) -> None:
        """Takes one now."""
        at_s = asyncio.get_running_loop().time() - self._outcomes.start_s
        if self.moments and at_s <= self.moments[-1].at_s:
            return
        num_running = num_waiting = used = held = 0
        for instance in self._cluster.living():
            running, waiting, used_tokens, held_tokens = _counts(instance)
            num_running, num_waiting = num_running + running, num_waiting + waiting
            used, held = used + used_tokens, held + held_tokens
        live = self._ingress.requests()
        num_generated = self._outcomes.num_generated + sum(request.num_generated for request in live)
        self.moments.append(
            Moment(
                at_s=at_s,
                groups=self._named(self._controller.state().layout),
                num_running=num_running,
                num_waiting=num_waiting,
                num_unplaced=self._ingress.num_waiting,
                used_tokens=used,
                held_tokens=held,
                demand_tokens=sum(request.num_tokens for request in live),
                generated_tokens=num_generated - self.num_generated,
            )
        )
        self.num_generated = num_generated
        slots = range(self._controller.config.num_instances)
        self.instance_kv.append(tuple(_kv_share(self._cluster.newest(InstanceId(slot))) for slot in slots))

    def _named(self, layout: Layout) -> str:
        if layout is not self._layout:
            self._layout = layout
            groups = " ".join(str(group) for group in layout.groups)
            self._groups = groups if groups != self._groups else self._groups
        return self._groups


def _counts(instance: SimInstance) -> tuple[int, int, int, int]:
    """Running and waiting requests, tokens in use, and tokens of room: of its own lane, and of the group it leads."""
    own, run = instance.lane.scheduler, instance.group
    num_held = len(instance.held or ())
    used = (own.num_blocks - own.num_free) * instance.sizes.dp.block_size
    if run is None:
        return len(own.running), len(own.waiting) + num_held, used, own.num_blocks * instance.sizes.dp.block_size
    num_paused = len(own.running) + len(own.waiting)
    if run.leader is not instance:
        return 0, num_paused, used, 0
    wide, reserved = run.lane.scheduler, run.num_reserved
    blocks = wide.num_blocks - wide.num_free + reserved
    return (
        len(wide.running),
        len(wide.waiting) + len(run.arriving) + num_paused + num_held,
        used + blocks * run.capacity.block_size,
        (wide.num_blocks + reserved) * run.capacity.block_size,
    )


def _kv_share(instance: SimInstance | None) -> float:
    """Share of the KV in use, of its group where it is in one."""
    if instance is None:
        return 0.0
    run = instance.group
    if run is None:
        scheduler, reserved = instance.lane.scheduler, 0
    else:
        scheduler, reserved = run.lane.scheduler, run.num_reserved
    num_blocks = scheduler.num_blocks + reserved
    return round((num_blocks - scheduler.num_free) / num_blocks, 4) if num_blocks else 0.0
