"""A whole elastic cluster in a few seconds: real instances, controller and ingress, without Ray."""

import asyncio
import contextlib
import errno
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pengserve.cluster.ingress.config import IngressConfig, LimitConfig
from pengserve.cluster.ingress.routing.routes import CalledSource
from pengserve.controller.events import EventLog
from pengserve.controller.loop import Controller
from pengserve.controller.process_port import HOST_COMMAND, ProcessPort
from pengserve.controller.terms import LocalTermStore, Term
from pengserve.planners.groups import complete, expand
from pengserve.planners.types.config import (
    ControllerConfig,
    DropConfig,
    InstanceConfig,
    JudgeConfig,
    MergeConfig,
    MicrobatchPolicy,
)
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import InstanceId, InstanceKey, Version
from pengserve.planners.types.layout import Group
from pengserve.planners.types.plans import LayoutTarget
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceState, RoutingTable
from pengserve.planners.types.strategy import SwitchStrategy
from tests.support.ingress import MODEL_NAME, serving, wait_ready
from tests.support.parking_host import VARIABLE as PARKS
from tests.support.processes import CHANNEL_TOKEN, ENGINE, OFFLINE

START_TIMEOUT_S = 600.0
MAX_POLL_S = 1.0  # a controller that was replaced never answers, and its death is no error here
T = TypeVar("T")


class Disk:
    """The disk of the event log. While it is full it takes a part of what it is given, and then nothing."""

    def __init__(self) -> None:
        self.is_full = False

    def write(self, file: int, data: memoryview) -> int:
        """As `os.write`."""
        if not self.is_full:
            return os.write(file, data)
        if len(data) < 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(file, data[: len(data) // 2])


class ElasticCluster:
    """N instances under one controller. Methods are called from any thread but the controller's own."""

    def __init__(
        self,
        model: Path,
        num_instances: int,
        *,
        degrees: Sequence[int] = (2,),
        engine: Mapping[str, Any] | None = None,
        merge: MergeConfig | None = None,
        drop: DropConfig | None = None,
        judge: JudgeConfig | None = None,
        max_stages: int = 1,
        microbatches: MicrobatchPolicy = MicrobatchPolicy.LOOKAHEAD,
        max_in_flight: int = 0,
        memory_bytes: int = 0,
        chunk_bytes: int = 64 << 10,
        peer_timeout_s: float = 5.0,
        host_bytes: int = 0,
        link_bytes_per_s: float = 0.0,
        places_by_slo: bool = False,
        host_module: str = "",
        device: str = "cpu",
        communicator: str = "",
    ) -> None:
        flags = {**ENGINE, **(engine or {})}
        if memory_bytes:
            flags.pop("kv_cache_memory_bytes")
        self.instance_config = InstanceConfig(
            app="tests",
            model=str(model),
            device=device,
            communicator=communicator,
            engine=flags,
            max_stages=max_stages,
            microbatches=microbatches,
            max_in_flight=max_in_flight,
            memory_bytes=memory_bytes,
            chunk_bytes=chunk_bytes,
            channel_token=CHANNEL_TOKEN,
            degrees=tuple(degrees),
            peer_timeout_s=peer_timeout_s,
            host_bytes=host_bytes,
            link_bytes_per_s=link_bytes_per_s,
            places_by_slo=places_by_slo,
        )
        module = host_module or ("tests.support.parking_host" if host_bytes else "")
        self._command = ("-m", module) if module else HOST_COMMAND
        self.config = ControllerConfig(
            app="tests",
            num_instances=num_instances,
            degrees=tuple(degrees),
            merge=merge or MergeConfig(is_auto=False),
            drop=replace(drop or DropConfig(is_auto=False), max_stages=max_stages),
            judge=judge or JudgeConfig(),
            tick_s=0.1,
            restart_backoff_s=0.1,
            restart_backoff_max_s=0.5,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="controller", daemon=True)
        self.controller: Controller
        self.port: ProcessPort
        self._files = tempfile.TemporaryDirectory(prefix="pengserve-elastic-")
        self._log_path = f"{self._files.name}/events.jsonl"
        self.disk = Disk()
        self._terms = LocalTermStore()  # outlives controllers, as Ray's store does

    def start(self) -> None:
        """Starts everything and waits until all groups can be formed."""
        self.begin()
        self.wait_formable()

    def begin(self) -> None:
        """Starts everything."""
        self._thread.start()

        async def start() -> None:
            self.port = ProcessPort(
                self.instance_config,
                python=sys.executable,
                environment=OFFLINE,
                environment_of=lambda key: {
                    "PENGSERVE_TEST_FAILPOINT": str(self._failpoint(key.instance_id)),
                    PARKS: str(self._parks),
                },
                command=self._command,
                directory=Path(logs) if (logs := os.environ.get("PENGSERVE_TEST_LOGS")) else None,
            )
            self._begin_controller()

        self.call(start())

    def _begin_controller(self) -> None:
        log = EventLog(self._log_path, write=self.disk.write)
        self.controller = Controller(self.config, self.port, log, term=Term(self._terms))
        self._run = asyncio.create_task(self.controller.run())

    def restart_controller(self) -> None:
        """Ends the controller, whatever it is doing, and starts another one over the same instances."""

        async def restart() -> None:
            await self.controller.stop()
            self._run.cancel()
            self._begin_controller()

        self.call(restart())

    @property
    def _parks(self) -> Path:
        return Path(self._files.name) / "parks"

    def park_at_random(self, is_wanted: bool) -> None:
        """With host tiers: requests are parked, placed and resumed at random from now on, or none is any more."""
        if is_wanted:
            self.park("")
        else:
            self._parks.unlink(missing_ok=True)

    def park(self, orders: str) -> None:
        """With host tiers: instances obey these orders from now on; see `tests/support/parking_host.py`."""
        new = self._parks.with_suffix(".new")
        new.write_text(orders)
        new.rename(self._parks)

    def _failpoint(self, instance_id: int) -> Path:
        return Path(self._files.name) / f"failpoint-{instance_id}"

    def arm(self, instance_id: int, failpoint: str) -> None:
        """The next time that instance comes to this place in a switch, it obeys (see `switching/failpoints.py`)."""
        self._failpoint(instance_id).write_text(failpoint)

    def wait_reached(self, instance_id: int, timeout_s: float = 80.0) -> float:
        """Waits until that instance is where it was armed for; when that was seen, on the monotonic clock."""
        deadline_s = time.monotonic() + timeout_s
        while self._failpoint(instance_id).exists():
            assert time.monotonic() < deadline_s, "the place in the switch was not reached"
            time.sleep(0.005)
        return time.monotonic()

    def disarm(self) -> None:
        """Takes back what was not reached."""
        for instance_id in range(self.config.num_instances):
            self._failpoint(instance_id).unlink(missing_ok=True)

    def stop(self) -> None:
        """Ends the controller and its children."""

        async def stop() -> None:
            await self.controller.stop()
            await self.port.close()
            self._run.cancel()

        self.call(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._files.cleanup()

    def call(self, work: Any, timeout_s: float = 240.0) -> Any:
        """Runs a coroutine on the controller's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def now(self, function: Callable[[], T]) -> T:
        """Runs a function on the controller's loop."""

        async def run() -> T:
            return function()

        result: T = self.call(run())
        return result

    def snapshot(self) -> ClusterSnapshot:
        """The cluster as of the last tick."""
        return self.now(lambda: self.controller.snapshot())

    def events(self, kind: EventKind | None = None) -> list[Event]:
        """Everything that happened, or what is of one kind."""
        events = self.now(lambda: self.controller.events(limit=1 << 20))
        return [event for event in events if kind is None or event.kind is kind]

    def wait(self, what: Callable[[ClusterSnapshot], bool], timeout_s: float = 240.0) -> ClusterSnapshot:
        """Waits until the snapshot says so."""
        deadline_s = time.monotonic() + timeout_s
        snapshot: ClusterSnapshot | None = None
        while time.monotonic() < deadline_s:
            with contextlib.suppress(Exception):  # the controller may still recover
                snapshot = self.snapshot()
                if what(snapshot):
                    return snapshot
            time.sleep(0.02)
        raise TimeoutError(f"it did not happen within {timeout_s:g} s: {snapshot}\n{self.events()[-8:]}")

    def wait_formable(self, timeout_s: float = START_TIMEOUT_S) -> ClusterSnapshot:
        """Waits until all instances are READY and all groups can be formed."""
        stages = [2**k for k in range(1, 10) if 2**k <= self.config.drop.max_stages]
        expected = sum(self.config.num_instances // degree for degree in (*self.config.degrees, *stages))

        def is_formable(s: ClusterSnapshot) -> bool:
            ready = all(i.state is InstanceState.READY for i in s.instances)
            return ready and len(s.groups) == expected

        return self.wait(is_formable, timeout_s)

    def set_layout(self, text: str, strategy: str = "carry", *, timeout_s: float = 240.0) -> ClusterSnapshot:
        """Asks for a layout, like `pengserve layout set`, and waits for it."""
        return self.wait_layout(self.ask_layout(text, strategy), timeout_s)

    def wait_layout(self, wanted: Set[Group], timeout_s: float = 240.0) -> ClusterSnapshot:
        """Waits until the layout is that."""
        return self.wait(lambda s: set(s.layout.groups) == wanted, timeout_s)

    def ask_layout(self, text: str, strategy: str = "carry") -> Set[Group]:
        """Asks for a layout once it can be formed, and does not wait for it; the groups it will have."""
        snapshot = self.wait_formable()
        ranks = tuple(InstanceId(i) for i in range(self.config.num_instances))
        wanted = set(complete(expand(text, snapshot.groups, ranks), ranks))
        target = LayoutTarget(groups=tuple(wanted), strategy=SwitchStrategy(strategy))
        self.now(lambda: self.controller.set_layout(target))
        return wanted

    def key(self, instance_id: int) -> InstanceKey:
        """The life in a slot now."""
        return self.snapshot().instances[instance_id].key

    def pid(self, instance_id: int) -> int:
        """Process of the life in a slot."""
        key = self.key(instance_id)
        return self.now(lambda: self.port.pid(key))

    def require_memory(self, *instance_ids: int) -> None:
        """Conservation laws of the memory of these instances, or of all."""
        for key in map(self.key, instance_ids or range(self.config.num_instances)):
            broken = self.call(self.port.check(key))
            assert broken == (), f"instance {key}: {broken}"

    def require_layout(self, shape: str) -> None:
        """All groups have this shape still: none has failed in its steps, and been made good for by its members."""
        shapes = {group.shape for group in self.snapshot().layout.groups}
        assert shapes == {shape}, f"{shape} was asked for, and after its first steps there is {shapes}"

    @contextlib.contextmanager
    def ingress(self, **changes: Any) -> Iterator[str]:
        """A real ingress in front; yields its URL."""
        given: dict[str, Any] = {
            "instance": self.instance_config,
            "num_instances": self.config.num_instances,
            "served_model_names": (MODEL_NAME,),
            "metrics_backend": "prometheus",
            "limits": LimitConfig(allow_grammars=True),
        }
        with serving(IngressConfig(**{**given, **changes}), ControllerSource(self)) as url:
            wait_ready(url)
            yield url


class ControllerSource(CalledSource):
    """The controller as a `RoutingSource`, called across threads."""

    def __init__(self, cluster: ElasticCluster) -> None:
        self._cluster = cluster

    async def routing(self, known_version: Version, timeout_s: float) -> RoutingTable:
        """See `RoutingSource`."""
        return await super().routing(known_version, min(timeout_s, MAX_POLL_S))

    async def _call(self, method: str, *arguments: Any) -> Any:
        async def run() -> Any:
            result = getattr(self._cluster.controller, method)(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._cluster._loop))


@contextlib.contextmanager
def elastic_cluster(model: Path, num_instances: int, **changes: Any) -> Iterator[ElasticCluster]:
    """A started cluster; stopped at the end."""
    with started(ElasticCluster(model, num_instances, **changes)) as cluster:
        yield cluster


@contextlib.contextmanager
def started(cluster: ElasticCluster) -> Iterator[ElasticCluster]:
    """Starts it; stopped at the end."""
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
