"""The instances of a simulated cluster: they start, serve, change their shape, and die."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pengserve.planners.types.directory import PeerDirectory
from pengserve.planners.types.errors import EngineError, FenceError, PengServeError, StepError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.orders import Migrate, Redirect, RequestOrder
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import DeviceInfo, InstanceState, KvCapacity
from pengserve.planners.types.step_cost import STEP_TOKENS, StepCost
from pengserve.simulator.engine.driver import Driver, Owner
from pengserve.simulator.engine.group import end_group
from pengserve.simulator.engine.instance import BuildLane, SimInstance
from pengserve.simulator.engine.memory import Sizes, lane_infos
from pengserve.simulator.engine.scheduler import TakesOrders
from pengserve.simulator.engine.switches.drop import drop
from pengserve.simulator.engine.switches.merge import check_merge, merge
from pengserve.simulator.engine.switches.restore import restore
from pengserve.simulator.engine.switches.split import check_split, split
from pengserve.simulator.engine.switches.switch import Network, SimSwitch
from pengserve.simulator.timing.switches import SwitchCosts

_KINDS = {"merge": merge, "split": split, "drop": drop, "restore": restore}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """How many instances there are, where, and what they can be."""

    num_instances: int
    per_node: int  # instances of one node
    sizes: Sizes
    shapes: tuple[str, ...] = ()  # beside dp
    start_s: float = 0.0  # until an instance that replaces another is ready
    step_costs: Mapping[str, StepCost] = field(default_factory=dict)  # by shape, as profiled
    step_tokens: int = STEP_TOKENS  # new tokens of a full step


@dataclass(slots=True, eq=False)
class _UnderWay:
    switch: SimSwitch
    task: "asyncio.Task[SwitchReport]"
    failure: PengServeError | None = None  # why it was broken off


class SimCluster:
    """Who lives now, and which switches are under way. Everything runs on one event loop of virtual time."""

    def __init__(
        self, shape: ClusterShape, *, build: BuildLane, owner: Owner, network: Network, costs: SwitchCosts
    ) -> None:
        self.shape, self.owner, self.network, self.costs = shape, owner, network, costs
        self.instances: dict[InstanceKey, SimInstance] = {}
        self._build = build
        self._lanes = lane_infos(shape.sizes, shape.shapes, shape.step_costs, shape.step_tokens) if shape.shapes else ()
        self._newest: dict[InstanceId, InstanceKey] = {}
        self._prepared: dict[tuple[InstanceKey, str], SwitchPlan] = {}
        self._under_way: dict[str, _UnderWay] = {}
        self._reports: dict[str, SwitchReport] = {}
        self._directory: tuple[PeerDirectory | None, dict[InstanceKey, tuple[str, ...]]] = (None, {})

    # Lives ------------------------------------------------------------------------------------------------------------

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest request, where instances never serve alone; else 0: it is for the controller to say."""
        lanes = self._lanes if self.shape.sizes.is_static else ()
        return max((lane.capacity.max_model_len for lane in lanes[1:] if lane.capacity is not None), default=0)

    def living(self) -> Iterator[SimInstance]:
        """Instances that have not died."""
        return (instance for instance in self.instances.values() if instance.is_alive)

    def newest(self, instance_id: InstanceId) -> SimInstance | None:
        """The newest life in a slot, if it lives."""
        key = self._newest.get(instance_id)
        instance = self.instances.get(key) if key is not None else None
        return instance if instance is not None and instance.is_alive else None

    def create(self, key: InstanceKey) -> None:
        """Begins a life; one that replaces another is ready after `start_s`. One that exists is left alone."""
        if key in self.instances:
            return
        slot, per_node = key.instance_id, self.shape.per_node
        device = DeviceInfo(node_id=f"node{slot // per_node:05d}", device=f"gpu:{slot % per_node}", pid=slot + 1)
        instance = SimInstance(key, device, self.shape.sizes, self._build, self._lanes)
        self.instances[key], self._newest[key.instance_id] = instance, key
        start_s = self.shape.start_s if key.incarnation > 1 else 0.0  # traffic begins when the first ones are ready
        asyncio.get_running_loop().call_later(start_s, self._ready, instance)

    def _ready(self, instance: SimInstance) -> None:
        if instance.state is InstanceState.STARTING:
            instance.state = InstanceState.READY
            self.owner.touched(instance.key)

    def find(self, key: InstanceKey) -> SimInstance:
        """That life of an instance.

        Raises:
            EngineError: it is over.
        """
        if not self.lives(key):
            raise EngineError(f"instance {key} has ended")
        return self.instances[key]

    def lives(self, key: InstanceKey) -> bool:
        """Whether that life of an instance goes on."""
        instance = self.instances.get(key)
        return instance is not None and instance.is_alive

    def die(self, key: InstanceKey) -> None:
        """The process of an instance ends at once. Its group ends, and its requests are resumed elsewhere."""
        instance = self.instances.get(key)
        if instance is None or not instance.is_alive:
            return
        instance.state = InstanceState.DEAD
        for under_way in list(self._under_way.values()):
            if instance in under_way.switch.members:
                self._break_off(under_way, EngineError(f"instance {key} was lost"))
        if instance.group is not None:
            self._break_group(instance)
        lost = instance.requests()
        instance.lane.close()
        self.owner.touched(key)
        self.owner.lost(key, lost)

    def _break_group(self, dead: SimInstance) -> None:
        """The survivors of a group go on alone; what it ran is resumed from its tokens."""
        run = dead.group
        assert run is not None
        lost = end_group(run)
        if self.shape.sizes.is_static:  # an engine over several GPUs ends with any of them
            self.owner.lost(run.leader.key, lost)
            for member in run.members:
                self.die(member.key)
            return
        for member in run.members:
            if member.is_alive:
                if run.group.kind is GroupKind.PP:
                    member.lane.stall(self._reload_s(run.members.index(member), len(run.members)))
                member.lane.resume()
                self.owner.touched(member.key)
        if run.leader.is_alive:
            self.owner.moved(lost, None, carried=False)
        else:
            self.owner.lost(run.leader.key, lost)

    def _reload_s(self, rank: int, num_stages: int) -> float:
        """Until a survivor of a pipeline has read its missing layers from its own copy on disk."""
        sizes = self.shape.sizes
        missing = sizes.num_layers - sizes.stage_sizes(num_stages)[rank]
        return missing * sizes.layer_bytes / self.costs.start_bytes_per_s

    def remove(self, key: InstanceKey) -> None:
        """Ends an instance, if it lives, and frees its place."""
        self.die(key)
        self.instances.pop(key, None)

    async def order(self, key: InstanceKey, orders: Sequence[RequestOrder]) -> None:
        """Orders about the requests of an instance: to redirect some, or, with a host tier, to park, resume and place.

        Raises StepError, FenceError, EngineError.
        """
        instance = self.find(key)
        redirects = [order for order in orders if isinstance(order, Redirect)]
        for redirect in redirects:
            if redirect.source != key:
                raise FenceError(f"order {redirect.order_id} is for instance {redirect.source}, this is {key}")
            self._redirect(instance, redirect)
        if len(redirects) == len(orders):
            return
        scheduler = instance.lane.scheduler
        if any(isinstance(order, Migrate) for order in orders):
            raise StepError(f"instance {key} is simulated, and migrates by its own policy alone")
        if not isinstance(scheduler, TakesOrders):
            raise StepError(f"instance {key} has no host tier: set cluster.host_bytes")
        wanted = [order for order in orders if not isinstance(order, Migrate | Redirect)]
        for order in wanted:
            if order.instance != key:
                raise FenceError(f"order {order.order_id} is for instance {order.instance}, this is {key}")
        await instance.lane.pause()
        try:
            scheduler.take_orders(wanted)
        finally:
            if instance.is_alive:
                instance.lane.resume()

    def _redirect(self, instance: SimInstance, order: Redirect) -> None:
        """As production does, it does nothing where another instance schedules, or the shape changes."""
        run = instance.group
        leads = run is None or run.leader is instance
        if leads and not any(instance in under_way.switch.members for under_way in self._under_way.values()):
            self.owner.moved(instance.current.redirect(order.max_tokens), order.target, carried=False)

    # Switches ---------------------------------------------------------------------------------------------------------

    def connect(self, key: InstanceKey, directory: PeerDirectory) -> None:
        """Takes a newer directory of peers."""
        instance = self.find(key)
        if self._directory[0] is not directory:
            names: dict[InstanceKey, list[str]] = {}
            for spec in directory.groups:
                for member in spec.members:
                    names.setdefault(member, []).append(spec.name)
            self._directory = directory, {member: tuple(found) for member, found in names.items()}
        instance.groups_ready = self._directory[1].get(key, ())

    def prepare(self, key: InstanceKey, plan: SwitchPlan) -> None:
        """Whether a member can take part; changes nothing visible. Raises StepError, FenceError, EngineError."""
        instance = self.find(key)
        if instance.state is not InstanceState.READY:
            raise StepError(f"instance {key} is not ready to change its shape")
        if key not in plan.members:
            raise FenceError(f"instance {key} is not a member of {plan.group} any more")
        if plan.epoch < instance.epoch:
            raise FenceError(f"the plan is for epoch {plan.epoch}, and instance {key} is at {instance.epoch}")
        if any(instance in under_way.switch.members for under_way in self._under_way.values()):
            raise StepError(f"instance {key} is in the middle of another switch")
        (check_merge if plan.is_merge else check_split)(plan, instance)
        self._prepared[key, plan.plan_id] = plan

    async def commit(self, key: InstanceKey, plan: SwitchPlan) -> SwitchReport:
        """Carries out a prepared plan; goes on where the caller does not wait for it. Raises StepError, EngineError."""
        if plan.plan_id in self._reports:
            return self._reports[plan.plan_id]
        if plan.plan_id not in self._under_way:
            self._begin(key, plan)
        under_way = self._under_way[plan.plan_id]
        try:
            return await asyncio.shield(under_way.task)
        except asyncio.CancelledError:
            if under_way.failure is not None:
                raise under_way.failure from None
            raise

    def _begin(self, key: InstanceKey, plan: SwitchPlan) -> None:
        for member in plan.members:
            if (member, plan.plan_id) not in self._prepared:
                raise StepError(f"instance {member} has not prepared {plan.plan_id}")
            del self._prepared[member, plan.plan_id]
        members = tuple(self.find(member) for member in plan.members)
        switch = SimSwitch(plan=plan, members=members, around=self)
        task = asyncio.get_running_loop().create_task(self._carry_out(switch), name=plan.plan_id)
        task.add_done_callback(_report)
        self._under_way[plan.plan_id] = _UnderWay(switch, task)

    async def _carry_out(self, switch: SimSwitch) -> SwitchReport:
        plan = switch.plan
        try:
            report = await _KINDS[plan.verb](switch)
        except BaseException:
            switch.undo()
            raise
        finally:
            del self._under_way[plan.plan_id]
        self._reports[plan.plan_id] = report
        return report

    def abort(self, key: InstanceKey, plan_id: str) -> None:
        """Forgets a prepared plan, and calls off one that has moved nothing yet."""
        self._prepared.pop((key, plan_id), None)
        under_way = self._under_way.get(plan_id)
        if under_way is not None and under_way.switch.may_end:
            self._break_off(under_way, StepError("the controller called it off"))

    def _break_off(self, under_way: _UnderWay, failure: PengServeError) -> None:
        if under_way.failure is None:
            under_way.failure = failure
            under_way.task.cancel()

    def group_lane(self, group: Group, members: tuple[SimInstance, ...], capacity: KvCapacity) -> Driver:
        """A lane for a group, with no requests and all of its blocks."""
        return self._build(group.shape, capacity, members)


def _report(task: "asyncio.Task[SwitchReport]") -> None:
    """A switch has ended; its caller may have left. An error that is no `PengServeError` ends the simulation."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, PengServeError):
        task.get_loop().call_exception_handler({"message": f"{task.get_name()} failed", "exception": error})
