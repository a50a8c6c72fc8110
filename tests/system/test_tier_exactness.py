"""Any request gives the tokens that it gives on plain vLLM, with KV on device and host, through any changes of shape.

As `test_shape_exactness`, on instances whose device is too small for what runs: requests are parked at need and by
orders, their layers are placed, instances merge, split, drop and restore, requests migrate, and an instance dies.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from pengserve.planners.types.events import EventKind
from tests.support.disturbed import ENDS_WITHIN_S, Disturbed
from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.ingress import FixedRoutes, ingress_config, serving, wait_ready
from tests.support.processes import InstanceProcess
from tests.support.scene import nothing_runs
from tests.support.streams import make_prompts
from tests.support.traffic import TimedStream, Traffic
from tests.support.waiting import until
from tests.system.test_shape_exactness import LAYOUTS, STRATEGIES, Machine

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

BLOCK_BYTES = 65_536  # of the tiny model's KV: 32 tokens
HOST_BLOCKS = 160
MEMORY_BYTES = {2: (6 << 20) + 100_000, 4: (4 << 20) + 700_000}  # of an instance: 3 MiB of weights, the rest for KV


def requests(count: int, max_tokens: int, longest: int = 500) -> list[dict[str, Any]]:
    """Greedy and seeded ones in turn, of which a few fill a device."""
    made: list[dict[str, Any]] = []
    for i, prompt in enumerate(make_prompts(count, seed=8, longest=longest)):
        params: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens + 11 * (i % 3)}
        if i % 2:
            params |= {"temperature": 0.8, "seed": 50 + i, "top_p": 0.95}
        if i % 3 == 0:
            params |= {"presence_penalty": 0.4}
        made.append(params)
    return made


class Tiered(Disturbed):
    """A cluster with host tiers, and what plain instances answer."""

    def __init__(
        self, cluster: ElasticCluster, traffic: Traffic, given: list[dict[str, Any]], expected: list[TimedStream]
    ) -> None:
        self.cluster, self.traffic, self.expected, self._num_orders = cluster, traffic, expected, 0
        self.requests = given

    @property
    def widest(self) -> int:
        """Members of the widest group."""
        return self.cluster.config.num_instances

    def start_all(self) -> "list[tuple[int, Future[TimedStream]]]":
        """All requests at once: more than both devices hold. Returns when several of them decode."""
        live = [TimedStream() for _ in self.requests]
        pairs = zip(self.requests, live, strict=True)
        found = [(i, self.traffic.start(**request, into=stream)) for i, (request, stream) in enumerate(pairs)]
        until(lambda: sum(len(stream.times_s) > 2 for stream in live) >= 4)
        return found

    def total(self, name: str) -> int:
        """A figure of all instances."""
        return sum(getattr(instance.stats, name) for instance in self.cluster.snapshot().instances)

    def settle(self) -> None:
        """All is over, and nothing is left."""
        self.cluster.park_at_random(False)
        self.cluster.set_layout("dp")
        self.cluster.wait(nothing_runs, timeout_s=160.0)
        self.check_memory()
        for instance in self.cluster.snapshot().instances:
            assert instance.stats.kv_blocks_used == 0 and instance.stats.num_parked == 0


def answers(instances: list[InstanceProcess], given: list[dict[str, Any]]) -> list[TimedStream]:
    """Of vLLM with room for everything, one by one."""
    with serving(ingress_config(instances), FixedRoutes(instances)) as url:
        wait_ready(url)
        with Traffic(url) as traffic:
            found = [traffic.start(**request).result(ENDS_WITHIN_S) for request in given]
    assert [stream.error for stream in found] == [""] * len(found)
    return found


REQUESTS = requests(14, 50)


@pytest.fixture(scope="module")
def expected(instances: list[InstanceProcess]) -> list[TimedStream]:
    return answers(instances, REQUESTS)


@contextlib.contextmanager
def tiered_cluster(
    model: Path, num_instances: int, given: list[dict[str, Any]], expected: list[TimedStream], **changes: Any
) -> Iterator[Tiered]:
    """Instances with host tiers, over a link of 2 GB/s where `changes` say nothing else."""
    changes = {"max_stages": num_instances, "link_bytes_per_s": 2e9, **changes}
    with (
        elastic_cluster(model, num_instances, **changes) as cluster,
        cluster.ingress() as url,
        Traffic(url) as traffic,
    ):
        yield Tiered(cluster, traffic, given, expected)


@pytest.fixture(scope="module", params=[2, 4])
def tiered(request: pytest.FixtureRequest, model: Path, expected: list[TimedStream]) -> Iterator[Tiered]:
    with tiered_cluster(
        model,
        request.param,
        REQUESTS,
        expected,
        degrees=(2,) if request.param == 2 else (2, 4),
        memory_bytes=MEMORY_BYTES[request.param],
        host_bytes=HOST_BLOCKS * BLOCK_BYTES,
    ) as made:
        yield made


@pytest.mark.parametrize(("kind", "strategy"), [*(("tp", s) for s in STRATEGIES), ("pp", "carry"), ("pp", "hard")])
def test_a_switch_takes_along_what_is_on_the_host(tiered: Tiered, kind: str, strategy: str) -> None:
    running = tiered.start_all()
    num_ends = len(tiered.cluster.events(EventKind.TRANSITION_END))
    tiered.cluster.set_layout(f"{kind}{tiered.widest}", strategy)
    tiered.check_memory()
    begun = tiered.cluster.events(EventKind.TRANSITION_END)[num_ends]
    running += tiered.start_all()
    tiered.cluster.set_layout("dp", strategy)
    tiered.check_memory()
    tiered.check_all(running)
    tiered.settle()
    if strategy == "carry":
        assert begun.data["num_carried"] > 0
        assert begun.data["num_recomputed"] == 0


def test_pairs_become_a_wider_group_with_what_is_on_the_host(tiered: Tiered) -> None:
    if tiered.widest < 4:
        pytest.skip("two instances are one pair")
    tiered.cluster.set_layout("tp2")
    tiered.cluster.park_at_random(True)
    running = tiered.start_all() + tiered.start_all()
    num_ends = len(tiered.cluster.events(EventKind.TRANSITION_END))
    tiered.cluster.set_layout("tp4")
    tiered.check_memory()
    [grown] = tiered.cluster.events(EventKind.TRANSITION_END)[num_ends:]
    assert grown.data["num_carried"] > 0 and grown.data["num_recomputed"] == 0
    running += tiered.start_all()
    tiered.cluster.require_layout("tp4")
    tiered.cluster.park_at_random(False)
    tiered.check_all(running)
    tiered.settle()


def test_a_group_holds_more_than_its_devices(tiered: Tiered) -> None:
    tiered.cluster.set_layout(f"tp{tiered.widest}")
    before = tiered.total("total_preemptions"), tiered.total("total_parked")
    tiered.cluster.park_at_random(True)
    tiered.check_all(tiered.start_all() + tiered.start_all())
    tiered.check_memory()
    assert tiered.total("total_preemptions") == before[0], "what does not fit is parked"
    assert tiered.total("total_parked") > before[1]
    tiered.settle()


def test_requests_on_the_host_migrate(tiered: Tiered) -> None:
    tiered.cluster.park_at_random(True)
    before = tiered.total("total_migrated")
    running = tiered.start_all()
    while not all(future.done() for _, future in running):
        for source, target in ((0, 1), (1, 0)):
            tiered.migrate(source, target)
            time.sleep(0.2)
    tiered.check_all(running)
    assert tiered.total("total_migrated") > before
    tiered.settle()


def test_a_member_that_dies_costs_no_token(tiered: Tiered) -> None:
    for kind in ("tp", "pp"):
        tiered.cluster.set_layout(f"{kind}{tiered.widest}")
        tiered.cluster.park_at_random(True)
        running = tiered.start_all()
        time.sleep(1.0)
        key = tiered.cluster.key(1)
        os.kill(tiered.cluster.pid(1), signal.SIGKILL)
        tiered.check_all(running)
        tiered.cluster.wait(lambda s, key=key: s.instances[1].key != key)  # type: ignore[misc]
        tiered.cluster.wait_formable()
        tiered.settle()


class TieredMachine(Machine):
    """Parks and places come and go beside all else."""

    disturbed: Tiered

    @rule(data=st.data(), strategy=st.sampled_from(STRATEGIES))
    def change(self, data: st.DataObject, strategy: str) -> None:
        layout = data.draw(st.sampled_from(LAYOUTS[self.disturbed.widest]))
        self.disturbed.cluster.set_layout(layout, strategy)

    @rule(is_wanted=st.booleans())
    def park_or_not(self, is_wanted: bool) -> None:
        self.disturbed.cluster.park_at_random(is_wanted)

    def teardown(self) -> None:
        self.disturbed.cluster.park_at_random(False)
        super().teardown()


def test_any_sequence(tiered: Tiered) -> None:
    TieredMachine.disturbed = tiered
    run_state_machine_as_test(
        TieredMachine,
        settings=settings(
            max_examples=5,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],  # a cluster cannot be put back, so a failure cannot be shrunk
            suppress_health_check=list(HealthCheck),
        ),
    )
    tiered.settle()
