"""Laws of the drain of one instance, and of deaths in a migration: no stream ends in an error, and no token changes.

One cluster of two serves all cases. A case that kills costs a replacement: most carry the mark `faults`.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.snapshot import InstanceState
from tests.support.elastic import elastic_cluster
from tests.support.scene import Scene
from tests.support.streams import make_prompts
from tests.support.traffic import TimedStream, Traffic
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

ENDS_WITHIN_S = 400.0
SOURCE_POINTS, TARGET_POINTS = ("offered", "copying", "tail", "held"), ("reserved", "tail-came", "taken")
COMMON = ("held", "tail-came", "taken")
NUM_STREAMS = 8


@pytest.fixture(scope="module")
def scene(model: Any) -> Iterator[Scene]:
    with elastic_cluster(model, 2, peer_timeout_s=4.0) as cluster, cluster.ingress() as url, Traffic(url) as traffic:
        yield Scene(cluster, traffic)


def is_ready(scene: Scene, instance_id: int) -> bool:
    return scene.cluster.snapshot().instances[instance_id].state is InstanceState.READY


def test_a_drain_under_load_loses_nothing(scene: Scene) -> None:
    cluster, traffic = scene.cluster, scene.traffic
    cluster.wait(lambda s: all(i.state is InstanceState.READY for i in s.instances))
    requests: list[dict[str, Any]] = [
        {"prompt": prompt, "max_tokens": 200} | ({"temperature": 0.9, "seed": i} if i % 2 else {})
        for i, prompt in enumerate(make_prompts(NUM_STREAMS, seed=21, longest=200))
    ]
    requests[2] |= {"structured_outputs": {"regex": "[a-z ]{400,}"}}
    expected = [future.result(ENDS_WITHIN_S) for future in [traffic.start(**request) for request in requests]]
    running: list[Future[TimedStream]] = []
    live = [TimedStream() for _ in requests]
    running = [traffic.start(**request, into=stream) for request, stream in zip(requests, live, strict=True)]
    deadline_s = time.monotonic() + 240.0
    while not all(stream.token_ids for stream in live):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    url = f"{traffic.url}/cluster/instances/1"
    assert httpx.post(f"{traffic.url}/cluster/instances/9/drain", json={}).status_code == 400
    started_s = time.monotonic()
    first = httpx.post(f"{url}/drain", json={"timeout_s": 120}).json()
    assert first["id"] == "drain-1.1" and not first["safe_to_delete"], first
    while not (operation := httpx.get(f"{url}/drain").json())["safe_to_delete"]:
        assert time.monotonic() < started_s + 240.0, operation
        time.sleep(0.05)
    drain_s = time.monotonic() - started_s
    assert httpx.post(f"{url}/drain", json={}).json() == operation, "it is idempotent"
    refused = httpx.post(f"{traffic.url}/cluster/instances/0/drain", json={})
    assert refused.status_code == 400 and "only one that serves" in refused.text
    streams = [future.result(ENDS_WITHIN_S) for future in running]
    assert [stream.error for stream in streams] == [""] * NUM_STREAMS
    assert [stream.token_ids for stream in streams] == [stream.token_ids for stream in expected]
    waits = [
        f"{stream.longest_gap_s:.3f} (undisturbed {alone.longest_gap_s:.3f})"
        for stream, alone in zip(streams, expected, strict=True)
    ]
    print(f"\n  drained in {drain_s:.2f} s; longest waits between tokens in s: {', '.join(waits)}")
    assert not cluster.events(EventKind.INSTANCE_DRAIN_ERROR) and not cluster.events(EventKind.INSTANCE_LOST)
    cluster.require_memory(0)
    assert httpx.post(f"{url}/undrain", json={}).status_code == 200
    cluster.wait_formable()
    assert cluster.key(1).incarnation == 2


def test_sigterm_loses_nothing(scene: Scene) -> None:
    """Also a request with a grammar, which cannot move with its KV, and what arrives while the instance leaves."""
    cluster, traffic = scene.cluster, scene.traffic
    cluster.wait_formable()
    prompts = make_prompts(NUM_STREAMS, seed=22, longest=200)
    requests: list[dict[str, Any]] = [{"prompt": prompt, "max_tokens": 200} for prompt in prompts]
    requests[1] |= {"structured_outputs": {"regex": "[a-z ]{400,}"}}
    expected = [future.result(ENDS_WITHIN_S) for future in [traffic.start(**request) for request in requests]]
    live = [TimedStream() for _ in requests]
    running = [traffic.start(**request, into=stream) for request, stream in zip(requests, live, strict=True)]
    until(lambda: all(stream.token_ids for stream in live), timeout_s=240.0)
    key, pid, num_events = cluster.key(1), cluster.pid(1), len(cluster.events())
    os.kill(pid, signal.SIGTERM)
    running += [traffic.start(**request) for request in requests]
    scene.wait_dead(pid)
    streams = [future.result(ENDS_WITHIN_S) for future in running]
    assert [stream.error for stream in streams] == [""] * 2 * NUM_STREAMS
    assert [stream.token_ids for stream in streams] == 2 * [stream.token_ids for stream in expected]
    kinds = [e.kind for e in cluster.events()[num_events:] if e.span == f"instance:{key}"]
    assert kinds == [EventKind.INSTANCE_DRAIN_START, EventKind.INSTANCE_DRAIN_END]
    cluster.require_memory(0)
    cluster.wait_formable()
    assert cluster.key(1).incarnation == key.incarnation + 1


def cases() -> list[Any]:
    found = []
    for victim, points in ((0, SOURCE_POINTS), (1, TARGET_POINTS)):
        for point in points:
            name = f"{'source' if victim == 0 else 'target'}-{point}"
            marks = [] if point in COMMON else [pytest.mark.faults]
            found.append(pytest.param(victim, point, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("victim", "point"), cases())
def test_death_in_a_migration(scene: Scene, victim: int, point: str) -> None:
    cluster = scene.cluster
    cluster.wait_formable()
    running = scene.send(scene.short)
    pid = cluster.pid(victim)
    cluster.arm(victim, f"{point}:kill")
    try:
        for number in range(40):
            order = Migrate(
                order_id=f"{victim}-{point}-{number}",
                source=cluster.key(0),
                target=cluster.key(1),
                max_tokens=1 << 20,
            )
            with contextlib.suppress(EngineError):  # it may die before it answers
                cluster.call(cluster.port.order(order.source, [order]))
            if not cluster._failpoint(victim).exists():
                break
            time.sleep(0.05)
        died_s = scene.wait_dead(pid)
    finally:
        cluster.disarm()
    scene.require_service(died_s)
    scene.require_memory(1 - victim)
    scene.require_equal(scene.short, running)
    cluster.wait_formable()
    scene.require_memory()
