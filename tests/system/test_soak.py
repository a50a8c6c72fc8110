"""Everything at once, at random, for a while: no stream fails, and every token is the one it would have been.

Requests come and clients leave, memory is too small for all, layouts are asked for while others are under way or left
to the planners, requests migrate, instances fall silent or die, the controller is replaced, its disk is full. With a
host tier requests are served by shares of tenants, of which one floods the cluster, and their priorities change.
`make soak` goes on for as long as it is told to; the seed of a failure is in its message.
"""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from pengserve.planners.types.config import DropConfig, MergeConfig
from pengserve.planners.types.errors import PengServeError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.snapshot import InstanceState
from pengserve.planners.types.strategy import SwitchStrategy
from pengserve.planners.types.tenants import FairnessConfig
from tests.support.disturbed import requests as mixed_requests
from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.scene import nothing_runs
from tests.support.traffic import TimedStream, Traffic
from tests.system.test_shape_exactness import LAYOUTS

SOAK_S = float(os.environ.get("SOAK_S", "40"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
NUM_INSTANCES = int(os.environ.get("SOAK_INSTANCES", "2"))
WITHOUT = set(os.environ.get("SOAK_WITHOUT", "").split(","))  # names of actions, to find which of them a failure needs
pytestmark = [pytest.mark.slow, pytest.mark.shapes, pytest.mark.timeout(SOAK_S + 500)]

MEMORY_BYTES = 7 << 20  # of an instance: 3 MiB of weights; KV for about 1,900 tokens
HOST_BYTES = 6 << 20  # of an instance, where it has a host tier; KV for about 3,000 tokens
PEER_TIMEOUT_S = 4.0
ROUND_S = 10.0  # of disorder, before all is compared
MOST_RUNNING = 40
LONGEST_STALL_S = 1.5  # shorter than peers wait
ENDS_WITHIN_S = 600.0  # a member that died must be replaced
FLOOD, GUESTS = "flood", ("acme", "bolt")  # tenants


@dataclass
class Running:
    """A stream, and which request it is."""

    index: int
    name: str  # its id
    future: "Future[TimedStream]"
    live: TimedStream
    has_left: bool = False


@dataclass
class Soak:
    """A cluster, and what may happen to it."""

    cluster: ElasticCluster
    traffic: Traffic
    chance: random.Random
    requests: list[dict[str, Any]]
    expected: list[TimedStream]
    admin: httpx.Client | None = None  # where requests have tenants, and priorities that may change
    running: list[Running] = field(default_factory=list)
    told: list[str] = field(default_factory=list)  # what happened, for the message of a failure
    num_orders: int = 0
    num_sent: int = 0
    num_changed: int = 0  # priorities

    @property
    def actions(self) -> dict[Callable[[], None], float]:
        """What may happen next, and how often."""
        return {
            self.send: 10.0,
            self.let_it_run: 10.0,
            self.ask: 5.0,
            self.leave: 3.0,
            self.auto: 1.0,
            self.stall: 0.7,
            self.replace_controller: 0.3,
            self.kill: 0.4,
            self.fill_disk: 0.5,
            self.migrate: 5.0,
            self.park: 1.0,
            **({self.churn: 6.0, self.flood: 0.5} if self.admin is not None else {}),
        }

    def disorder(self, until_s: float) -> None:
        """Things happen until then."""
        actions, weights = zip(*((a, w) for a, w in self.actions.items() if a.__name__ not in WITHOUT), strict=True)
        while time.monotonic() < until_s:
            self.chance.choices(actions, weights)[0]()

    def send(self) -> None:
        """Requests come, unless too many are under way."""
        count = self._send(self.chance.randint(1, 6), self.chance.choice(GUESTS) if self.admin is not None else "")
        self.told.append(f"send {count}")

    def flood(self) -> None:
        """One tenant sends as many requests as may be under way."""
        self.told.append(f"flood {self._send(MOST_RUNNING, FLOOD)}")

    def _send(self, count: int, tenant: str) -> int:
        self.running = [stream for stream in self.running if not self._is_checked(stream)]
        count = max(0, min(count, MOST_RUNNING - len(self.running)))
        for _ in range(count):
            index, live, name = self.chance.randrange(len(self.requests)), TimedStream(), f"soak-{self.num_sent}"
            headers = {"x-request-id": name} | ({"x-pengserve-tenant": tenant} if tenant else {})
            future = self.traffic.start(**self.requests[index], headers=headers, into=live)
            self.running.append(Running(index, name, future, live))
            self.num_sent += 1
        return count

    def churn(self) -> None:
        """Some requests become more or less urgent."""
        assert self.admin is not None
        found = [stream for stream in self.running if not stream.future.done()]
        for stream in self.chance.sample(found, min(4, len(found))):
            body = {"priority": self.chance.randint(-2, 2)}
            answer = self.admin.put(f"/cluster/requests/{stream.name}/priority", json=body)
            # 404: it has ended, or is on its way.
            assert answer.status_code in (200, 404), f"{answer.text}; SOAK_SEED={SEED}"
            self.num_changed += answer.status_code == 200
        self.told.append("churn")

    def leave(self) -> None:
        """A client closes its connection."""
        staying = [stream for stream in self.running if not stream.future.done()]
        if staying:
            stream = self.chance.choice(staying)
            stream.has_left = True
            stream.future.cancel()
            self.told.append("leave")

    def ask(self) -> None:
        """A layout is asked for, and nobody waits for it."""
        if len(self._ready()) == NUM_INSTANCES:
            layout = self.chance.choice(LAYOUTS[NUM_INSTANCES])
            strategy = self.chance.choice([*SwitchStrategy, SwitchStrategy.CARRY, SwitchStrategy.CARRY])
            self.told.append(f"ask {layout} {strategy.value}")
            self.cluster.ask_layout(layout, strategy.value)

    def auto(self) -> None:
        """The planners decide from now on."""
        self.told.append("auto")
        self.cluster.now(self.cluster.controller.auto_layout)

    def stall(self) -> None:
        """An instance falls silent, for less than its peers wait."""
        pid = self._any_pid()
        if pid:
            seconds = self.chance.uniform(0.1, LONGEST_STALL_S)
            self.told.append(f"stall {seconds:.1f} s")
            with contextlib.suppress(ProcessLookupError):  # it may have been killed just before
                os.kill(pid, signal.SIGSTOP)
                try:
                    time.sleep(seconds)
                finally:
                    os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """An instance dies."""
        pid = self._any_pid()
        if pid:
            self.told.append("kill")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def replace_controller(self) -> None:
        """Another controller takes over."""
        self.told.append("controller")
        self.cluster.restart_controller()

    def migrate(self) -> None:
        """Requests of one instance are told to go on at another one; neither waits for it."""
        keys = self._ready()
        if len(keys) < 2:
            return
        source, target = self.chance.sample(keys, 2)
        self.num_orders += 1
        order = Migrate(
            order_id=f"soak-{self.num_orders}",
            source=source,
            target=target,
            max_tokens=self.chance.choice([200, 1 << 20]),
            must_leave=self.chance.random() < 0.3,
        )
        with contextlib.suppress(PengServeError):  # one of them has just died
            self.cluster.call(self.cluster.port.order(source, [order]))
            self.told.append("migrate")

    def park(self) -> None:
        """Where there are host tiers: requests are parked, placed and resumed at random, or none is any more."""
        is_wanted = self.chance.random() < 0.6
        self.cluster.park_at_random(is_wanted)
        self.told.append(f"park {is_wanted}")

    def fill_disk(self) -> None:
        """The disk of the event log becomes full, or has room again."""
        self.cluster.disk.is_full = not self.cluster.disk.is_full
        self.told.append("disk full" if self.cluster.disk.is_full else "disk has room")

    def let_it_run(self) -> None:
        """Nothing happens for a moment."""
        time.sleep(self.chance.uniform(0.0, 0.5))

    def settle(self) -> None:
        """All streams end as they would have; nothing is left over, in memory or elsewhere."""
        self.cluster.park_at_random(False)
        self.cluster.wait_formable()
        self.cluster.set_layout("dp", timeout_s=ENDS_WITHIN_S)
        for stream in self.running:
            if not stream.has_left:
                stream.future.result(ENDS_WITHIN_S)
        assert all(self._is_checked(stream) for stream in self.running)
        self.running.clear()
        self.cluster.wait(nothing_runs, timeout_s=160.0)
        self.cluster.require_memory()
        for instance in self.cluster.snapshot().instances:
            assert instance.stats.kv_blocks_used == 0, f"instance {instance.key} holds KV of nobody"

    def _is_checked(self, stream: Running) -> bool:
        """Whether it has ended, and rightly."""
        expected = self.expected[stream.index]
        if stream.has_left:  # it may have had its answer before
            assert stream.live.token_ids == expected.token_ids[: len(stream.live.token_ids)], self._message(stream)
            return True
        if not stream.future.done():
            return False
        assert not stream.live.error, self._message(stream)
        assert stream.live.token_ids == expected.token_ids, self._message(stream)
        assert stream.live.finish_reason == expected.finish_reason, self._message(stream)
        return True

    def _message(self, stream: Running) -> str:
        return (
            f"request {stream.index}, {self.requests[stream.index]}: {stream.live.error or 'other tokens'}; "
            f"SOAK_SEED={SEED}, and before it: {', '.join(self.told[-60:])}"
        )

    def _any_pid(self) -> int:
        """Of an instance that is up; 0 where there is none."""
        keys = self._ready()
        with contextlib.suppress(KeyError):  # it has just been found dead
            return self.cluster.now(lambda: self.cluster.port.pid(self.chance.choice(keys))) if keys else 0
        return 0

    def _ready(self) -> list[InstanceKey]:
        """Instances that are up, as far as the controller knows, which may just have begun."""
        snapshot = self.cluster.wait(lambda _: True)
        return [instance.key for instance in snapshot.instances if instance.state is InstanceState.READY]


def make_requests() -> list[dict[str, Any]]:
    """Those of the other tests of exactness, of very different lengths, and some of them urgent."""
    chance = random.Random(SEED)
    return [
        request | {"max_tokens": chance.randint(1, 160)} | ({"priority": -1} if i % 5 == 4 else {})
        for i, request in enumerate(mixed_requests(24, max_tokens=0, seed=SEED))
    ]


@pytest.fixture(
    params=[
        pytest.param(0, id="device", marks=pytest.mark.faults),
        pytest.param(HOST_BYTES, id="device and host, tenants"),
    ]
)
def soak(model: Path, request: pytest.FixtureRequest) -> Iterator[Soak]:
    has_tenants = request.param > 0
    policy = "priority" if has_tenants else "fcfs"
    degrees = tuple(2**k for k in range(1, 4) if 2**k <= NUM_INSTANCES)
    with (
        elastic_cluster(
            model,
            NUM_INSTANCES,
            degrees=degrees,
            max_stages=NUM_INSTANCES,
            memory_bytes=MEMORY_BYTES,
            host_bytes=request.param,
            peer_timeout_s=PEER_TIMEOUT_S,
            merge=MergeConfig(min_dwell_s=1.0, quiet_s=0.5),
            drop=DropConfig(restore_below=0.6, quiet_s=0.5, min_dwell_s=0.5),
            engine={"max_num_seqs": 32, "scheduling_policy": policy},
        ) as cluster,
        cluster.ingress(is_tenant_trusted=has_tenants, fairness=FairnessConfig(is_on=has_tenants)) as url,
        Traffic(url) as traffic,
        httpx.Client(base_url=url, timeout=ENDS_WITHIN_S, trust_env=False) as admin,
    ):
        requests = make_requests()
        cluster.set_layout("dp")
        expected = [traffic.start(**request).result(ENDS_WITHIN_S) for request in requests]  # one by one: no pressure
        assert [stream.error for stream in expected] == [""] * len(expected)
        yield Soak(cluster, traffic, random.Random(SEED), requests, expected, admin if has_tenants else None)


def test_everything_at_once(soak: Soak) -> None:
    if soak.admin is not None:
        soak.flood()
    ends_s = time.monotonic() + SOAK_S
    while (now_s := time.monotonic()) < ends_s:
        soak.disorder(min(now_s + ROUND_S, ends_s))
        soak.settle()
    counts = Counter(what.partition(" ")[0] for what in soak.told)
    assert {"send", "ask", "leave"} - WITHOUT <= counts.keys()
    assert soak.admin is None or soak.num_changed > 0
    print(f"\n  {counts.total()} things happened: {dict(counts)}")
