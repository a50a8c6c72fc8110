"""Laws: whichever member dies while a group grows or a pipeline is cut,

- no stream ends in an error, and every token is the one it would have been;
- the survivors answer again in time, and their memory holds its laws;
- once the replacement is ready, the layout is what was asked for.

0 leads the wide group, 2 leads the other part, 1 and 3 follow in their parts. Four instances take a while to come
back on two cores: a few cases stand for all, the rest carries the mark `faults` (`make test-faults`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import elastic_cluster
from tests.support.scene import Scene
from tests.support.traffic import Traffic

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

PEER_TIMEOUT_S = 4.0
MEMORY_BYTES = 24 << 20  # of an instance
LAYOUTS = {
    "grow": ("pp2", "pp4"),
    "join": ("pp2@(2,3)", "pp4"),
    "cut": ("pp4", "pp2"),
    "widen": ("tp2", "tp4"),
    "widen-one": ("tp2@(2,3)", "tp4"),
}
WHO = {0: "leader", 1: "follower", 2: "part-leader", 3: "part-follower"}
COMMON = (
    ("grow", "waved", 0),
    ("grow", "meeting", 2),
    ("cut", "waved", 2),
    ("widen-one", "wave", 3),
)
POINTS = {
    0: ("prepared", "begun", "meeting", "wave", "waved", "committing", "committed"),
    1: ("prepared", "meeting", "met", "wave", "waved", "committed"),
}
ALL = tuple((switch, point, who) for switch in LAYOUTS for who in WHO for point in POINTS[min(who, 1)]) + tuple(
    ("cut", "returning", who) for who in WHO
)


def cases() -> list[Any]:
    """All cases; those that not every run of the suite needs are marked."""
    return [
        pytest.param(
            *case,
            id=f"{case[0]}-{case[1]}-{WHO[case[2]]}",
            marks=() if case in COMMON else pytest.mark.faults,
        )
        for case in (*COMMON, *(case for case in ALL if case not in COMMON))
    ]


@pytest.fixture(scope="module")
def scene(model: Path) -> Iterator[Scene]:
    with (
        elastic_cluster(
            model, 4, degrees=(2, 4), max_stages=4, memory_bytes=MEMORY_BYTES, peer_timeout_s=PEER_TIMEOUT_S
        ) as cluster,
        cluster.ingress() as url,
        Traffic(url) as traffic,
    ):
        yield Scene(cluster, traffic)


@pytest.mark.parametrize(("switch", "point", "victim"), cases())
def test_death_while_a_group_changes(scene: Scene, switch: str, point: str, victim: int) -> None:
    before, after = LAYOUTS[switch]
    cluster = scene.cluster
    cluster.set_layout(before)
    running = scene.send(scene.short)
    pid = cluster.pid(victim)
    cluster.arm(victim, f"{point}:kill")
    try:
        cluster.ask_layout(after)
        died_s = scene.wait_dead(pid)
    finally:
        cluster.disarm()
    scene.require_service(died_s)
    scene.require_memory(*(i for i in scene.ids if i != victim))
    streams = scene.require_equal(scene.short, running)
    assert any(stream.times_s[-1] > died_s for stream in streams), "nothing ran any more when it died"
    scene.require_recovery(after)
