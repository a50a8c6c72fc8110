"""The world of migrations, whose instances also change their layout: real lanes, changes, pipelines and arenas.

A change is carried out at one moment, as `leading.py` and `following.py` do it when all members stand still; words go
through the codec of switches. Where a change makes members send something beside the steps, that goes on in the world.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from pengserve.planners.layer_sizes import LayerSizes
from pengserve.planners.stages import stage_layers
from pengserve.planners.types.errors import EngineError, StepError
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.strategy import SwitchStrategy
from pengserve.replicas.engine.groups.group_run import STEP
from pengserve.replicas.engine.groups.leases import Leases
from pengserve.replicas.engine.instance_lanes import Lanes
from pengserve.replicas.engine.stepper import Stepper
from pengserve.replicas.kv.tiers import DeviceTier
from pengserve.replicas.kv.transfers import Transfers
from pengserve.replicas.memory.arena.open import open_arena
from pengserve.replicas.memory.layers import LayerMemory
from pengserve.replicas.migration.migrations import Migrations
from pengserve.replicas.switching.changes.table import change_of
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.messages import SwitchCodec, SwitchMessage
from pengserve.replicas.switching.running_group import BROKEN, RunningGroup, end_run
from tests.replicas.migration.sum_lanes import BLOCK, HEADS, LAYERS, KvMemory, SumLane, SumPpLane, SumTpLane
from tests.replicas.migration.world import TIMEOUT_S, SumInstance, World
from tests.support.thread_exchange import ThreadExchange

CHUNK, BLOCK_BYTES = 64 << 10, 2 * HEADS * BLOCK * 8
SIZES = LayerSizes(num_chunks=12, chunk_bytes=CHUNK, weight_bytes=(60_000,) * LAYERS, block_bytes=BLOCK_BYTES)
NUM_BLOCKS = SIZES.num_blocks(SIZES.all_layers) - 1


class ArenaKv(KvMemory):
    """KV that shares memory with weights, which are layer + 1 in every byte."""

    def __init__(self, layers: LayerMemory) -> None:
        self.kv = [layers.kv(layer).view(-1).view(torch.float64).view(layers.max_blocks, -1) for layer in range(LAYERS)]


class ChangeMemory:
    """What lanes ask of `BaseMemory`."""

    weight_order = 0

    def __init__(self) -> None:
        self._arena = open_arena(torch.device("cpu"), SIZES.num_chunks * CHUNK, CHUNK)
        self.layers = LayerMemory(self._arena, SIZES, fewest_layers=1)
        for layer in range(LAYERS):
            self.layers.weights(layer).fill_(layer + 1)
        self.drop_weights = self.layers.drop_weights

    def note_filled(self, layer: int) -> None:
        assert (self.layers.weights(layer) == layer + 1).all()

    def make_whole(self) -> None:
        for layer in range(LAYERS):
            self.layers.resize_kv(layer, min(self.layers.num_blocks(layer), self.layers.base_blocks))
        for layer in range(LAYERS):
            if not self.layers.has_weights(layer):
                self.layers.bring_weights(layer)
                self.layers.weights(layer).fill_(layer + 1)
            self.layers.resize_kv(layer, self.layers.base_blocks)

    def close(self) -> None:
        self._arena.close()


class Registry:
    """Makes lanes when they are first asked for."""

    def __init__(self, instance: "ChangingInstance") -> None:
        self._instance = instance
        self._lanes: dict[Group, Any] = {}

    def require(self, group: Group) -> Any:
        if group not in self._lanes:
            self._lanes[group] = self._make(group)
        return self._lanes[group]

    tp = pp = require

    def _make(self, group: Group) -> Any:
        instance = self._instance
        rank, dp, lanes = group.members.index(instance.key.instance_id), instance.dp, instance.lanes
        if group.kind is GroupKind.TP:
            return SumTpLane(dp, str(group), rank, group.degree, lanes.leases.lease)
        num_blocks = SIZES.num_pipeline_blocks(stage_layers(LAYERS, group.degree))
        lane = SumPpLane(dp, str(group), rank, group.degree, num_blocks)
        lane._memory = instance.memory.layers
        return lane

    def rebuild(self, lane: Any) -> None:
        self._lanes = {group: other for group, other in self._lanes.items() if other is not lane}

    def find(self, group: Group | None) -> Any:
        return self._lanes.get(group) if group is not None else None

    def __iter__(self) -> Any:
        return iter(self._lanes.values())

    def totals_but(self, current: object) -> Counter[str]:
        return Counter()


class ChangingInstance(SumInstance):
    """An instance whose lanes are those of `Lanes`."""

    def __init__(self, world: "ChangeWorld", key: InstanceKey) -> None:
        super().__init__(world, key, 1)
        self.memory = ChangeMemory()
        self.dp = SumLane(NUM_BLOCKS, ArenaKv(self.memory.layers))
        self.dp.memory = self.memory  # type: ignore[attr-defined]
        lanes = self.lanes = Lanes.__new__(Lanes)
        lanes.dp, lanes.capacity, lanes.leases = self.dp, self.dp.capacity, Leases(self.dp)  # type: ignore[arg-type]
        lanes.tier = DeviceTier(self.memory.layers, lanes.leases.ledger)
        self.transfers = lanes.transfers = Transfers(lanes.leases.ledger)
        lanes.stepper = Stepper(self.dp, self.transfers, lambda error: self.break_group())  # type: ignore[arg-type]
        lanes.registry, lanes._dp_view, lanes._idle_totals, lanes.num_migrated = Registry(self), self.dp.view, {}, 0
        lanes.migrated_bytes = 0
        self.rounds = world.rounds
        self.handlers, self.lost_handlers = {STEP: self.handlers[STEP], BROKEN: self.hear_broken}, []
        self.lost_handlers.append(lambda key: self.submit(lambda: self.lost(key)))
        self.member = Member(key, lanes, self, self, self, TIMEOUT_S)  # type: ignore[arg-type]
        self.migrations = Migrations(self.member, self.submit, lambda: self.is_switching, lambda: None)
        wiring: Any = self
        self.running_group = RunningGroup(self.member, wiring, self.submit, lambda error: self.break_group())

    # Pool and wiring --------------------------------------------------------------------------------------------------

    def spec_of(self, group: Group, members: tuple[InstanceKey, ...]) -> Any:
        return SimpleNamespace(name=self.rounds.name(group))

    def group_named(self, name: str) -> Group:
        return Group.parse(name.partition("/")[0])

    def get(self, name: str) -> Any:
        return self.rounds.communicator(name, self.group_named(name), self.key)

    def bulk(self, name: str) -> None:
        """All goes by messages."""

    def mark_failed(self, name: str) -> None:
        self.rounds.end(name, self.group_named(name))

    # Its group --------------------------------------------------------------------------------------------------------

    def follow(self, parts: list[memoryview]) -> None:
        self.num_followed += 1
        self.running_group.follow(parts)

    def hear_broken(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        name = str(parts[0], "utf-8")
        self.submit(lambda: self.break_group() if self.running_group.name == name else None)

    def break_group(self) -> None:
        if self.lanes.running is None:
            return
        self.migrations.break_off()
        if self.running_group.run is not None:
            end_run(self.member, self.running_group.run)
        self.running_group.end()
        self.moved(self.lanes.abandon(), None, carried=False)

    def stop(self) -> bool:
        """Leader of a pipeline: makes the steps that have begun."""
        lane = self.lanes.running
        if lane is None or not lane.leads:
            return True
        lane.hold(True)
        return not lane.num_in_flight

    def require_laws(self) -> None:
        assert self.lanes.check() == ()


class Rounds:
    """The communicators of each group; another one once it has failed."""

    def __init__(self) -> None:
        self._numbers: Counter[Group] = Counter()
        self._exchanges: dict[str, ThreadExchange] = {}

    def name(self, group: Group) -> str:
        return f"{group}/{self._numbers[group]}"

    def end(self, name: str, group: Group) -> None:
        if name == self.name(group):
            self._numbers[group] += 1

    def communicator(self, name: str, group: Group, key: InstanceKey) -> Any:
        members = tuple(InstanceKey(instance_id=i, incarnation=1) for i in group.members)
        own = self._exchanges.setdefault(name, ThreadExchange()).communicator(members.index(key))
        return SimpleNamespace(name=name, members=members, timeout_s=TIMEOUT_S, exchange=own.exchange)


class ChangeWorld(World):
    """Instances alone that change their layout by the change classes of `replicas/switching/changes`."""

    def __init__(self, seed: int = 0, num_instances: int = 2) -> None:
        self.rounds = Rounds()
        self._numbers = itertools.count(1)
        super().__init__(seed, (1,) * num_instances)

    def _make(self, shape: str, num_blocks: int) -> None:
        super()._make(shape, num_blocks)
        key = self.sides[-1][0]
        self.instances[key] = ChangingInstance(self, key)

    def close(self) -> None:
        for instance in self.instances.values():
            instance.memory.close()  # type: ignore[attr-defined]

    def plan(
        self, group: str, *parts: str, is_merge: bool, strategy: SwitchStrategy = SwitchStrategy.CARRY
    ) -> SwitchPlan:
        wide, number = Group.parse(group), next(self._numbers)
        return SwitchPlan(
            plan_id=f"plan-{number}",
            epoch=Epoch(number),
            group=wide,
            members=tuple(self.keys[i] for i in wide.members),
            is_merge=is_merge,
            strategy=strategy,
            parts=tuple(map(Group.parse, parts)),
        )

    def members_of(self, plan: SwitchPlan) -> list[Any]:
        return [self.instances[key] for key in plan.members]

    def check(self, plan: SwitchPlan) -> None:
        """Raises where a member cannot take part."""
        for instance in self.members_of(plan):
            change_of(plan).check(instance.member, instance, plan)

    def stand_still(self, plan: SwitchPlan) -> None:
        """Prepared, and at a step boundary: what was sent to the members is heard, and no step is in flight."""
        members = self.members_of(plan)
        for instance in members:
            instance.migrations.give_way()
            instance.is_switching = True

        def is_still() -> bool:
            stopped = [instance.stop() for instance in members]
            waiting = any(self.wires.get((a.key, b.key)) for a in members for b in members)
            return all(stopped) and not waiting and not any(instance.commands for instance in members)

        self.run(is_still)

    def return_weights(self, plan: SwitchPlan) -> None:
        """Before a restore: weights come back beside the steps."""
        leader, settled = self.members_of(plan)[0], list[bool]()

        def tell(withheld: list[int]) -> None:
            for instance in self.members_of(plan)[1:]:
                instance.running_group.pipeline.begin_return(plan, withheld)

        leader.running_group.pipeline.lead_return(plan, tell, lambda: settled.append(True))
        self.run(lambda: bool(settled))

    def change(self, plan: SwitchPlan, fails: Callable[[int, InstanceKey], bool] | None = None) -> SwitchReport | None:
        """Carries out a plan. `fails(round, key)`: whether that member fails in that round; None is returned then."""
        self.check(plan)
        if change_of(plan).returns_weights:
            self.return_weights(plan)
        self.stand_still(plan)
        members = self.members_of(plan)
        changes = {i.key: change_of(plan)(i.member, i, i.running_group, plan) for i in members}
        rounds, has_begun = itertools.count(), False

        def take(key: InstanceKey, number: int, word: Any) -> Any:
            if fails is not None and fails(number, key):
                raise StepError("a test says so")
            codec = SwitchCodec()
            message = codec.decode([bytes(part) for part in codec.encode(SwitchMessage(plan.plan_id, word))])
            with torch.inference_mode():
                return changes[key].take(message.word)  # type: ignore[arg-type]

        def ask(word: Any) -> dict[InstanceKey, Any]:
            nonlocal has_begun
            number, has_begun = next(rounds), True
            if fails is not None and any(fails(number, key) for key in changes):
                # No other member waits in a collective for one that has failed: they are told.
                raise EngineError("a member has failed")
            with ThreadPoolExecutor(len(changes)) as pool:
                found = {key: pool.submit(take, key, number, word) for key in changes}
                return {key: future.result() for key, future in found.items()}

        met = {key: change.begin(None) for key, change in changes.items()}
        try:
            changes[plan.leader].move(met, ask)
        except EngineError as error:
            for change in changes.values():
                change.fail(error, has_begun=has_begun)
            self._go_on(members)
            return None
        reports = [changes[key].commit() for key in plan.members]
        self._go_on(members)
        return reports[0]

    @staticmethod
    def _go_on(members: Sequence[Any]) -> None:
        for instance in members:
            instance.is_switching = False
            instance.running_group.go_on()

    def require_right(self) -> None:
        for instance in self.instances.values():
            instance.require_laws()
        super().require_right()
