"""The controller against a real Ray: real processes, placement groups and SIGKILLs. Only the engine is absent."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pengserve.controller.events import EventLog, open_starts
from pengserve.planners.types.config import ControllerConfig, MergeConfig
from pengserve.planners.types.errors import EngineError, PlanError, SupersededError
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.ids import NO_VERSION
from pengserve.planners.types.layout import parse_groups
from pengserve.planners.types.plans import LayoutTarget
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceState, RoutingTable
from pengserve.planners.types.strategy import SwitchStrategy

pytestmark = pytest.mark.slow

CONFIG = ControllerConfig(app="ray-test", num_instances=2, tick_s=0.2, restart_backoff_s=0.1, cpus_per_instance=0.5)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster of one node, in processes of its own."""
    import ray as module

    module.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield module
    module.shutdown()


def light_instance() -> type:
    """An instance without an engine. Made in a function, so that workers get it by value."""

    class LightInstance:
        def __init__(self, config: dict[str, str], key: Any) -> None:
            self.config, self.key, self.draining = config, key, False
            self.lane, self.epoch, self.groups, self.term = "dp", 0, (), 0

        def status(self, term: int) -> Any:
            import os

            import ray

            from pengserve.planners.types.snapshot import (
                DeviceInfo,
                InstanceSnapshot,
                InstanceState,
                KvCapacity,
                LaneInfo,
            )

            self.term = max(self.term, term)
            node_id = ray.get_runtime_context().get_node_id()
            state = InstanceState.DRAINING if self.draining else InstanceState.READY
            failure = self.config.get("failure", "")
            capacity = KvCapacity(
                num_blocks=64, block_size=32, bytes_per_block=1, max_model_len=99, max_num_seqs=8, weight_bytes=1
            )
            return InstanceSnapshot(
                key=self.key,
                state=InstanceState.DEAD if failure else state,
                failure=failure,
                endpoint=f"127.0.0.1:{os.getpid()}",
                device=DeviceInfo(node_id=node_id, pid=os.getpid(), device=os.environ["TEST_DEVICE"]),
                lane=self.lane,
                epoch=self.epoch,
                lanes=tuple(LaneInfo(shape=shape, capacity=capacity) for shape in ("dp", "tp2")),
                peer_endpoint=f"127.0.0.2:{os.getpid()}",
                groups_ready=self.groups,
                term=self.term,
            )

        def connect(self, directory: Any, term: int) -> None:
            self.groups = tuple(spec.name for spec in directory.groups if self.key in spec.members)

        def prepare(self, plan: Any, term: int) -> None:
            from pengserve.planners.types.errors import StepError

            if plan.strategy.value == self.config.get("cannot"):
                raise StepError("its lane is busy")

        def commit(self, plan: Any, term: int) -> Any:
            from pengserve.planners.types.plans import SwitchReport

            self.lane, self.epoch = str(plan.group) if plan.is_merge else "dp", plan.epoch + 1
            return SwitchReport(plan_id=plan.plan_id, epoch=plan.epoch + 1)

        def abort(self, plan_id: str, term: int) -> None:
            self.aborted = plan_id

        def drain(self, timeout_s: float, term: int) -> bool:
            self.draining = True
            return True

        def retire(self, timeout_s: float, term: int = 0) -> bool:
            import time

            if self.config.get("busy"):
                time.sleep(timeout_s)
            return not self.config.get("busy")

    return LightInstance


class Client:
    """A controller actor, with calls that wait for their answer."""

    def __init__(self, ray: Any, config: ControllerConfig, instance_config: dict[str, str]) -> None:
        from pengserve.controller.ray_shell import ControllerShell

        self._ray = ray
        self._actor = (
            ray.remote(ControllerShell)
            .options(num_cpus=0)
            .remote(config, instance_config, light_instance(), {"TEST_DEVICE": "cpu:7"})
        )

    def call(self, method: str, *arguments: Any) -> Any:
        return self._ray.get(getattr(self._actor, method).remote(*arguments), timeout=WAIT_S)

    def routed(self, wanted: Callable[[RoutingTable], bool]) -> RoutingTable:
        """The first table that is as `wanted`."""
        deadline_s, version = time.monotonic() + WAIT_S, NO_VERSION
        while time.monotonic() < deadline_s:
            table: RoutingTable = self.call("routing", version, 5.0)
            if wanted(table):
                return table
            version = table.version
        raise AssertionError(f"no such routes in {WAIT_S} s; events: {self.call('events', 0, 100)}")

    def snapshot(self) -> ClusterSnapshot:
        snapshot: ClusterSnapshot = self.call("snapshot")
        return snapshot

    def die(self) -> None:
        """SIGKILL: nothing of its own code runs any more."""
        self._ray.kill(self._actor)


def group_names(ray: Any) -> list[str]:
    """Names of the placement groups that hold resources."""
    from ray.util import placement_group_table

    return sorted(g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED")


def until(condition: Callable[[], bool]) -> None:
    """Waits for what nothing announces."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true"
        time.sleep(0.05)


def test_lives_and_deaths_of_instances_and_controllers(ray: Any, tmp_path: Path) -> None:
    log_path = str(tmp_path / "events.jsonl")
    config = ControllerConfig(
        app=CONFIG.app,
        num_instances=2,
        tick_s=CONFIG.tick_s,
        restart_backoff_s=CONFIG.restart_backoff_s,
        cpus_per_instance=CONFIG.cpus_per_instance,
        event_log_path=log_path,
    )
    first = Client(ray, config, {"model": "a"})
    table = first.routed(lambda table: len(table.routes) == 2)
    assert [str(route.key) for route in table.routes] == ["0.1", "1.1"]
    assert [name.rpartition(":")[0] for name in group_names(ray)] == [
        "pengserve:ray-test:instance:0.1",
        "pengserve:ray-test:instance:1.1",
    ]
    snapshot = first.snapshot()
    assert {i.device.device for i in snapshot.instances} == {"cpu:7"}, "the environment reached the processes"
    assert len({i.device.pid for i in snapshot.instances}) == 2

    killed_s = time.monotonic()
    os.kill(snapshot.instances[1].device.pid, signal.SIGKILL)
    first.routed(lambda table: all(str(route.key) != "1.1" for route in table.routes))
    assert time.monotonic() - killed_s < 40
    table = first.routed(lambda table: [str(route.key) for route in table.routes] == ["0.1", "1.2"])
    until(lambda: len(group_names(ray)) == 2)

    pids = {i.device.pid for i in first.snapshot().instances}
    first.die()
    second = Client(ray, config, {"model": "a"})
    adopted = second.routed(lambda table: len(table.routes) == 2)
    assert [str(route.key) for route in adopted.routes] == ["0.1", "1.2"]
    assert adopted.version > table.version and adopted.epoch > table.epoch
    assert {i.device.pid for i in second.snapshot().instances} == pids
    assert len(group_names(ray)) == 2

    assert second.call("drain", 10.0)
    assert second.call("routing", NO_VERSION, 1.0).routes == ()
    until(lambda: group_names(ray) == [])
    assert all(i.state is InstanceState.DEAD for i in second.snapshot().instances)
    second.call("shutdown")
    events = EventLog(log_path).tail(limit=1000)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert not open_starts(events)
    kinds = [event.kind for event in events]
    assert kinds.count(EventKind.INSTANCE_LOST) == 1 and kinds.count(EventKind.INSTANCE_ADOPTED) == 2
    (lost,) = (event for event in events if event.kind is EventKind.INSTANCE_LOST)
    assert lost.span == "instance:1.1" and lost.why.startswith("its process has ended: Worker unexpectedly exits")
    second.die()


def test_the_older_of_two_controllers_of_one_application_stops(ray: Any) -> None:
    config = replace(CONFIG, app="two-controllers")
    old = Client(ray, config, {})
    before = old.routed(lambda table: len(table.routes) == 2)
    new = Client(ray, config, {})
    after = new.routed(lambda table: len(table.routes) == 2)
    assert after.version > before.version
    assert [route.key for route in after.routes] == [route.key for route in before.routes], "adopted, not replaced"
    deadline_s = time.monotonic() + WAIT_S
    while not (stops := [e for e in old.call("events", 0, 1000) if e.kind is EventKind.CONTROLLER_STOP]):
        assert time.monotonic() < deadline_s, "the older one goes on"
        time.sleep(0.1)
    assert len(stops) == 1 and "has taken over" in stops[0].why
    with pytest.raises(EngineError, match="has taken over"):
        old.call("snapshot")
    assert new.call("drain", 10.0)
    for client in (old, new):
        client.die()


def test_no_two_claims_of_a_term_get_the_same_one(ray: Any) -> None:
    from pengserve.controller.ray_terms import RayTermStore

    async def claims() -> tuple[list[int], int, int]:
        store = RayTermStore("terms", "tests")
        claimed = await asyncio.gather(*(store.claim(0) for _ in range(12)))
        return claimed, await store.claim(100), await store.newest()

    claimed, above, newest = asyncio.run(claims())
    assert len(set(claimed)) == 12 and (above, newest) == (101, 101)


def test_instances_of_another_configuration_are_replaced_not_adopted(ray: Any) -> None:
    first = Client(ray, CONFIG, {"model": "a"})
    old = first.routed(lambda table: len(table.routes) == 2)
    first.die()
    second = Client(ray, CONFIG, {"model": "b"})
    new = second.routed(lambda table: len(table.routes) == 2)
    assert {route.endpoint for route in new.routes}.isdisjoint(route.endpoint for route in old.routes)
    assert all(n.key > o.key for n, o in zip(new.routes, old.routes, strict=True))
    assert second.call("drain", 10.0)
    second.die()
    until(lambda: group_names(ray) == [])


def test_two_controllers_of_one_name_and_two_configurations_never_mix(ray: Any) -> None:
    first = Client(ray, CONFIG, {"model": "a", "busy": "requests of its ingresses run"})
    old = first.routed(lambda table: len(table.routes) == 2)
    old_pids = {i.device.pid for i in first.snapshot().instances}
    second = Client(ray, CONFIG, {"model": "b"})
    new = second.routed(lambda table: len(table.routes) == 2)
    assert {route.endpoint for route in old.routes}.isdisjoint(route.endpoint for route in new.routes)
    assert all(Path(f"/proc/{pid}").exists() for pid in old_pids), "they go on beside the new ones"
    assert len(group_names(ray)) == 4
    until(lambda: any(e.kind is EventKind.CONTROLLER_STOP for e in first.call("events", 0, 1000)))
    with pytest.raises(SupersededError, match="has taken over"):
        first.call("routing", NO_VERSION, 1.0)

    os.kill(min(old_pids), signal.SIGKILL)
    until(lambda: len(group_names(ray)) == 3)
    assert len(second.routed(lambda table: len(table.routes) == 2).routes) == 2
    assert not second.call("drain", 2.0), "requests of the old ingresses still ran"
    until(lambda: group_names(ray) == [])
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in old_pids))
    for client in (first, second):
        client.die()


def test_a_failed_engine_is_tried_again_and_shows_why(ray: Any) -> None:
    why = "ConfigError: model: /nowhere is no model directory"
    client = Client(ray, CONFIG, {"failure": why})
    until(lambda: [i.key.incarnation for i in client.snapshot().instances if i.failure == why] != [])
    until(lambda: len([e for e in client.call("events", 0, 100) if e.kind is EventKind.INSTANCE_ERROR]) >= 4)
    assert {e.why for e in client.call("events", 0, 100) if e.kind is EventKind.INSTANCE_ERROR} == {why}
    client.call("drain", 5.0)
    client.die()
    until(lambda: group_names(ray) == [])


def test_switches_and_their_errors_pass_through_ray(ray: Any) -> None:
    config = replace(CONFIG, degrees=(2,), merge=MergeConfig(is_auto=False))
    client = Client(ray, config, {"cannot": "hard"})
    client.routed(lambda table: len(table.addresses) == 2)
    until(lambda: [str(group) for group in client.snapshot().groups] == ["tp2@(0,1)"])
    with pytest.raises(PlanError, match="no instance 7"):
        client.call("set_layout", LayoutTarget(groups=parse_groups("tp2@(0,7)")))
    pair = parse_groups("tp2@(0,1)")
    client.call("set_layout", LayoutTarget(groups=pair, strategy=SwitchStrategy.HARD))
    errors: list[str] = []

    def refused() -> bool:
        errors[:] = [e.why for e in client.call("events", 0, 1000) if e.kind is EventKind.TRANSITION_ERROR]
        return bool(errors)

    until(refused)
    assert re.fullmatch(r"instance 0\.\d+ cannot take part: its lane is busy", errors[0]), "no page of Ray's"
    client.call("set_layout", LayoutTarget(groups=pair))

    def committed() -> bool:
        return any(e.kind is EventKind.TRANSITION_END for e in client.call("events", 0, 1000))

    until(committed)
    assert client.call("drain", 10.0)
    client.die()
    until(lambda: group_names(ray) == [])
