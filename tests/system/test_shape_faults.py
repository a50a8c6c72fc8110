"""Laws: whoever dies or falls silent, in whatever phase of a switch,

- no stream ends in an error, and every token is the one it would have been;
- the survivors answer again within five seconds, and their memory holds its laws;
- once the replacement is ready, the layout is what was asked for, and the next switch works.

One cluster of two serves all cases. A case that kills costs a replacement, so a few stand for all in `make test`; the
rest of the matrix carries the mark `faults` (`make test-faults`).
"""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import elastic_cluster
from tests.support.scene import SERVES_WITHIN_S, Scene
from tests.support.traffic import Traffic

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

PEER_TIMEOUT_S = 4.0
LEADER, FOLLOWER = 0, 1
NAMES = {LEADER: "leader", FOLLOWER: "follower"}
LAYOUTS = {"merge": ("dp", "tp2"), "split": ("tp2", "dp"), "drop": ("dp", "pp2"), "restore": ("pp2", "dp")}
MEMORY_BYTES = 24 << 20  # of an instance


@dataclass(frozen=True)
class Case:
    """`victim` dies where it comes to `point` of that switch."""

    point: str
    victim: int
    switch: str = "merge"  # or drop; split or restore
    strategy: str = "carry"

    @property
    def id(self) -> str:
        """For people."""
        return f"{self.switch}-{self.strategy}-{self.point}-{NAMES[self.victim]}"

    @property
    def layouts(self) -> tuple[str, str]:
        """Before the switch, and after it."""
        return LAYOUTS[self.switch]


COMMON = (
    Case("meeting", FOLLOWER),
    Case("waved", LEADER),
    Case("draining", LEADER, strategy="sequential"),
    Case("committing", LEADER, "split"),
    Case("waved", FOLLOWER, "drop"),
    Case("returning", FOLLOWER, "restore"),
)
POINTS = {
    LEADER: ("prepared", "begun", "meeting", "wave", "waved", "committing", "committed"),
    FOLLOWER: ("prepared", "meeting", "met", "wave", "waved", "committed"),
}
ALL = (
    *(Case(p, who, switch) for switch in LAYOUTS for who in (LEADER, FOLLOWER) for p in POINTS[who]),
    *(Case("returning", who, "restore") for who in (LEADER, FOLLOWER)),
    *(Case("draining", who, strategy=how) for how in ("sequential", "soft") for who in (LEADER, FOLLOWER)),
    Case("draining", LEADER, "split", "sequential"),
    *(Case(p, who, strategy="hard") for p in ("meeting", "committed") for who in (LEADER, FOLLOWER)),
    *(Case("committed", who, "split", "soft") for who in (LEADER, FOLLOWER)),
)


def cases() -> list[Any]:
    """All cases; those that not every run of the suite needs are marked."""
    rest = [case for case in ALL if case not in COMMON]
    return [
        *(pytest.param(case, id=case.id) for case in COMMON),
        *(pytest.param(case, id=case.id, marks=pytest.mark.faults) for case in rest),
    ]


@pytest.fixture(scope="module")
def scene(model: Path) -> Iterator[Scene]:
    with (
        elastic_cluster(model, 2, max_stages=2, memory_bytes=MEMORY_BYTES, peer_timeout_s=PEER_TIMEOUT_S) as cluster,
        cluster.ingress() as url,
        Traffic(url) as traffic,
    ):
        yield Scene(cluster, traffic)


@pytest.mark.parametrize("case", cases())
def test_death_in_a_switch(scene: Scene, case: Case) -> None:
    before, after = case.layouts
    cluster = scene.cluster
    cluster.set_layout(before)
    running = scene.send(scene.short)
    pid = cluster.pid(case.victim)
    cluster.arm(case.victim, f"{case.point}:kill")
    try:
        cluster.ask_layout(after, case.strategy)
        died_s = scene.wait_dead(pid)
    finally:
        cluster.disarm()
    scene.require_service(died_s)
    scene.require_memory(1 - case.victim)
    streams = scene.require_equal(scene.short, running)
    assert any(stream.times_s[-1] > died_s for stream in streams), "nothing ran any more when it died"
    scene.require_recovery(after)


@pytest.mark.parametrize("shape", ["tp2", "pp2"])
def test_a_follower_that_is_told_to_end_costs_no_token(scene: Scene, shape: str) -> None:
    """Its group ends with it, and the group's requests go on from their tokens."""
    cluster = scene.cluster
    cluster.set_layout(shape)
    resumed = cluster.snapshot().instances[LEADER].stats.total_resumed
    pid = cluster.pid(FOLLOWER)
    running = scene.send(scene.short)
    os.kill(pid, signal.SIGTERM)
    died_s = scene.wait_dead(pid)
    scene.require_memory(LEADER)
    streams = scene.require_equal(scene.short, running)
    assert any(stream.times_s[-1] > died_s for stream in streams), "nothing ran any more when it ended"
    assert cluster.snapshot().instances[LEADER].stats.total_resumed > resumed
    scene.require_recovery(shape)


def steady() -> list[Any]:
    """Deaths in a group that changes nothing."""
    every = [(shape, phase, who) for shape in ("tp2", "pp2") for phase in ("decode", "prefill") for who in NAMES]
    common = [("tp2", "decode", LEADER), ("tp2", "prefill", FOLLOWER), ("pp2", "decode", FOLLOWER)]
    return [
        pytest.param(
            *case, id="-".join([*case[:2], NAMES[case[2]]]), marks=() if case in common else pytest.mark.faults
        )
        for case in every
    ]


@pytest.mark.parametrize(("shape", "phase", "victim"), steady())
def test_death_in_a_steady_group(scene: Scene, shape: str, phase: str, victim: int) -> None:
    scene.cluster.set_layout(shape)
    requests = scene.short if phase == "decode" else scene.long
    pid = scene.cluster.pid(victim)
    running = scene.send(requests)
    os.kill(pid, signal.SIGKILL)
    died_s = scene.wait_dead(pid)
    scene.require_service(died_s)
    scene.require_memory(1 - victim)
    streams = scene.require_equal(requests, running)
    began = [stream.times_s[0] < died_s for stream in streams]
    assert all(began) if phase == "decode" else not all(began), "it died in another phase"
    scene.require_recovery(shape)


def stalls() -> list[Any]:
    """Members that fall silent, for less and for more than their peers wait."""
    every = [(shape, who, how) for shape in ("tp2", "pp2") for who in NAMES for how in ("short", "long")]
    common = [("tp2", LEADER, "long"), ("pp2", FOLLOWER, "short")]
    return [
        pytest.param(
            *case, id=f"{case[0]}-{NAMES[case[1]]}-{case[2]}", marks=() if case in common else pytest.mark.faults
        )
        for case in every
    ]


STALLS_S = {"short": 2.0, "long": PEER_TIMEOUT_S + 2.0}


@pytest.mark.parametrize(("shape", "victim", "how"), stalls())
def test_silence_in_a_steady_group(scene: Scene, shape: str, victim: int, how: str) -> None:
    """A short silence costs its own length alone; after a long one all members are in dp, until the next round."""
    before = scene.cluster.set_layout(shape)
    running = scene.send(scene.short)
    pid = scene.cluster.pid(victim)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(STALLS_S[how])
    finally:
        os.kill(pid, signal.SIGCONT)
    scene.require_equal(scene.short, running)
    if how == "short":
        assert scene.cluster.snapshot().layout == before.layout
    scene.require_recovery(shape)
    assert scene.cluster.pid(victim) == pid, "silence is no death"


@pytest.mark.parametrize("how", STALLS_S)
@pytest.mark.parametrize(
    ("switch", "point", "victim"),
    [
        ("merge", "waved", FOLLOWER),
        pytest.param("merge", "waved", LEADER, marks=pytest.mark.faults),
        pytest.param("merge", "meeting", FOLLOWER, marks=pytest.mark.faults),
        pytest.param("merge", "committed", FOLLOWER, marks=pytest.mark.faults),
        pytest.param("merge", "committing", LEADER, marks=pytest.mark.faults),
        pytest.param("split", "waved", LEADER, marks=pytest.mark.faults),
        pytest.param("split", "waved", FOLLOWER, marks=pytest.mark.faults),
        pytest.param("split", "committing", LEADER, marks=pytest.mark.faults),
        pytest.param("drop", "waved", LEADER, marks=pytest.mark.faults),
        pytest.param("drop", "waved", FOLLOWER, marks=pytest.mark.faults),
        pytest.param("drop", "committing", LEADER, marks=pytest.mark.faults),
        pytest.param("restore", "waved", LEADER, marks=pytest.mark.faults),
        pytest.param("restore", "waved", FOLLOWER, marks=pytest.mark.faults),
        pytest.param("restore", "returning", FOLLOWER, marks=pytest.mark.faults),
    ],
)
def test_silence_in_a_switch(scene: Scene, switch: str, point: str, victim: int, how: str) -> None:
    before, after = LAYOUTS[switch]
    scene.cluster.set_layout(before)
    pids = [scene.cluster.pid(i) for i in NAMES]
    running = scene.send(scene.short)
    scene.cluster.arm(victim, f"{point}:stall:{STALLS_S[how]}")
    scene.cluster.ask_layout(after)
    fell_silent_s = scene.cluster.wait_reached(victim)
    streams = scene.require_equal(scene.short, running)
    assert any(stream.times_s[-1] > fell_silent_s for stream in streams), "nothing ran any more when it fell silent"
    scene.require_recovery(after)
    assert [scene.cluster.pid(i) for i in NAMES] == pids, "silence is no death"


@pytest.mark.parametrize(
    ("switch", "point", "where"),
    [
        ("merge", "prepared", FOLLOWER),
        ("merge", "waved", LEADER),
        ("split", "waved", FOLLOWER),
        ("drop", "waved", LEADER),
        ("restore", "waved", FOLLOWER),
    ],
)
def test_new_controller_in_a_switch(scene: Scene, switch: str, point: str, where: int) -> None:
    """Nobody dies but the controller: what was prepared is forgotten, what was committed ends, the pin still stands."""
    before, after = LAYOUTS[switch]
    scene.cluster.set_layout(before)
    pids = [scene.cluster.pid(i) for i in NAMES]
    running = scene.send(scene.short)
    scene.cluster.arm(where, f"{point}:stall:1")
    scene.cluster.ask_layout(after)
    scene.cluster.wait_reached(where)
    scene.cluster.restart_controller()
    streams = scene.require_equal(scene.short, running)
    assert max(stream.longest_gap_s for stream in streams) < 1.0 + SERVES_WITHIN_S
    scene.require_recovery(after)
    assert [scene.cluster.pid(i) for i in NAMES] == pids
