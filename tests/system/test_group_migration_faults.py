"""SIGKILL of any member of two groups in each phase of a migration: no stream ends in an error, and no token changes.

Groups: tp2 of instances 0 and 1, which requests leave, and pp2 of instances 2 and 3, where they come; or the other way.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.orders import Migrate
from tests.support.elastic import elastic_cluster
from tests.support.scene import Scene
from tests.support.traffic import Traffic

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

MEMORY_BYTES = 24 << 20
LAYOUT = "tp2@(0,1) pp2@(2,3)"
POINTS = (  # rank of the victim's group: source 0, target 1; its rank in it; where it dies
    *((0, 0, point) for point in ("offered", "copying", "tail", "held")),
    *((0, 1, point) for point in ("sharing", "sharing-last")),
    *((1, 0, point) for point in ("reserved", "tail-came", "taken")),
    (1, 1, "expecting"),
)
COMMON = ("sharing-last", "expecting", "taken")


@pytest.fixture(scope="module")
def scene(model: Any) -> Iterator[Scene]:
    with (
        elastic_cluster(
            model,
            4,
            degrees=(2, 4),
            max_stages=4,
            max_in_flight=2,
            memory_bytes=MEMORY_BYTES,
            peer_timeout_s=4.0,
        ) as cluster,
        cluster.ingress() as url,
        Traffic(url) as traffic,
    ):
        yield Scene(cluster, traffic)


def cases() -> list[Any]:
    found = []
    for source, target in ((0, 2), (2, 0)):
        for side, rank, point in POINTS:
            name = f"{'tp-pp' if source == 0 else 'pp-tp'}-{('source', 'target')[side]}-{rank}-{point}"
            marks = [] if point in COMMON and source == 0 else [pytest.mark.faults]
            victim = (source, target)[side] + rank
            found.append(pytest.param(source, target, victim, point, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("source", "target", "victim", "point"), cases())
def test_death_in_a_migration_between_groups(scene: Scene, source: int, target: int, victim: int, point: str) -> None:
    cluster = scene.cluster
    cluster.set_layout("dp")  # a new group has no prefixes: KV is copied
    cluster.set_layout(LAYOUT)
    running = scene.send(scene.short)
    pid = cluster.pid(victim)
    cluster.arm(victim, f"{point}:kill")
    try:
        for number in range(60):
            for first, second in ((source, target), (target, source)):
                order = Migrate(
                    order_id=f"{victim}-{point}-{first}-{number}",
                    source=cluster.key(first),
                    target=cluster.key(second),
                    max_tokens=1 << 20,
                )
                with contextlib.suppress(EngineError):  # it may die before it answers
                    cluster.call(cluster.port.order(order.source, [order]))
                time.sleep(0.1)
                if not cluster._failpoint(victim).exists():
                    break
            if not cluster._failpoint(victim).exists():
                break
        died_s = scene.wait_dead(pid)
    finally:
        cluster.disarm()
    scene.require_service(died_s)
    scene.require_equal(scene.short, running)
    cluster.wait_formable()
    scene.require_memory()
