"""Laws: whoever dies or falls silent, in whatever phase of a switch,

- no stream ends in an error, and every token is the one it would have been;
- the survivors answer again within five seconds, and their memory holds its laws;
- once the replacement is ready, the layout is what was asked for, and the next switch works.

One cluster of two serves all cases. A case that kills costs a replacement, so a few stand for all in `make test`; the
rest of the matrix carries the mark `faults` (`make test-faults`).
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceState
from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.traffic import TimedStream, Traffic

pytestmark = [pytest.mark.slow, pytest.mark.shapes, pytest.mark.timeout(240)]

SERVES_WITHIN_S = 5.0
ENDS_WITHIN_S = 90.0
PEER_TIMEOUT_S = 4.0
MAX_TOKENS = 250
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
    Case("begun", LEADER),
    Case("meeting", FOLLOWER),
    Case("waved", LEADER),
    Case("waved", FOLLOWER),
    Case("committed", LEADER),
    Case("draining", LEADER, strategy="sequential"),
    Case("committed", FOLLOWER, strategy="hard"),
    Case("wave", LEADER, "split"),
    Case("waved", FOLLOWER, "split"),
    Case("committing", LEADER, "split"),
    Case("wave", LEADER, "drop"),
    Case("waved", FOLLOWER, "drop"),
    Case("committed", FOLLOWER, "drop"),
    Case("waved", LEADER, "restore"),
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


class Scene:
    """A cluster of two, its traffic, and what each request gives when nothing happens."""

    def __init__(self, cluster: ElasticCluster, traffic: Traffic) -> None:
        self.cluster, self.traffic = cluster, traffic
        self.short = _requests(6, longest=120, max_tokens=MAX_TOKENS)
        self.long = [request | {"max_tokens": 20} for request in _requests(6, longest=900, shortest=700, max_tokens=0)]
        cluster.set_layout("dp")
        self._expected = {id(r): self._undisturbed(r) for r in (self.short, self.long)}

    def _undisturbed(self, requests: list[dict[str, Any]]) -> list[TimedStream]:
        streams = [future.result(ENDS_WITHIN_S) for future in [self.traffic.start(**r) for r in requests]]
        assert all(not stream.error for stream in streams), streams
        return streams

    def send(self, requests: list[dict[str, Any]]) -> "list[Future[TimedStream]]":
        """Begins these streams, and waits until the short ones decode, or the first of the long ones does."""
        live = [TimedStream() for _ in requests]
        futures = [self.traffic.start(**request, into=stream) for request, stream in zip(requests, live, strict=True)]
        begun = all if requests is self.short else any
        deadline_s = time.monotonic() + 30.0
        while not begun(stream.times_s for stream in live):
            assert time.monotonic() < deadline_s, "the streams did not begin"
            time.sleep(0.002)
        return futures

    def require_equal(self, requests: list[dict[str, Any]], futures: "list[Future[TimedStream]]") -> list[TimedStream]:
        """Waits for the streams; they are what they are undisturbed."""
        streams = [future.result(ENDS_WITHIN_S) for future in futures]
        assert [stream.error for stream in streams] == [""] * len(streams)
        for i, (stream, expected) in enumerate(zip(streams, self._expected[id(requests)], strict=True)):
            assert stream.token_ids == expected.token_ids, f"stream {i}: {requests[i]}"
            assert stream.finish_reason == expected.finish_reason
        return streams

    def require_service(self, since_s: float) -> None:
        """A new request is answered in time, counted from `since_s`."""
        fresh = self.traffic.start([int(since_s * 1e3) % 500, 11, 12], max_tokens=3)
        stream = fresh.result(ENDS_WITHIN_S)
        assert not stream.error, stream.error
        took_s = stream.times_s[-1] - since_s
        # Where others run on the same cores, everything takes so much longer.
        crowd = os.getloadavg()[0] / (2 * (os.cpu_count() or 1))
        assert took_s < SERVES_WITHIN_S * max(1.0, crowd), f"the survivors answered {took_s:.1f} s after the fault"

    def require_memory(self, *instance_ids: int) -> None:
        """Conservation laws of instances."""
        for key in map(self.cluster.key, instance_ids):
            broken = self.cluster.call(self.cluster.port.check(key))
            assert broken == (), f"instance {key}: {broken}"

    def require_recovery(self, wanted: str) -> None:
        """The layout is what was asked for, nothing is left over, and the next switch works."""
        self.cluster.wait(_shape_is(wanted), timeout_s=90.0)
        self.cluster.wait_formable()
        self.cluster.wait(_nothing_runs, timeout_s=15.0)
        self.require_memory(LEADER, FOLLOWER)
        other = "tp2" if wanted == "dp" else "dp"
        self.cluster.set_layout(other)
        assert self.traffic.start([5, 6, 7], max_tokens=4).result(ENDS_WITHIN_S).error == ""
        self.require_memory(LEADER, FOLLOWER)

    def wait_dead(self, pid: int, timeout_s: float = 30.0) -> float:
        """Waits until a process has ended; when that was seen, on the monotonic clock."""
        deadline_s = time.monotonic() + timeout_s
        while _lives(pid):
            assert time.monotonic() < deadline_s, f"process {pid} lives on: its failpoint was not reached"
            time.sleep(0.005)
        return time.monotonic()


def _requests(count: int, *, longest: int, max_tokens: int, shortest: int = 5) -> list[dict[str, Any]]:
    """Greedy and seeded ones in turn."""
    generator = random.Random(8)
    prompts = [
        [generator.randrange(10, 500) for _ in range(generator.randrange(shortest, longest))] for _ in range(count)
    ]
    sampled = {"temperature": 0.8, "top_p": 0.95}
    return [
        {"prompt": prompt, "max_tokens": max_tokens} | (sampled | {"seed": 40 + i} if i % 2 else {})
        for i, prompt in enumerate(prompts)
    ]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _shape_is(wanted: str) -> Any:
    shapes = {wanted}
    return lambda s: (
        {group.shape for group in s.layout.groups} == shapes
        and all(i.state is InstanceState.READY for i in s.instances)
    )


def _nothing_runs(snapshot: ClusterSnapshot) -> bool:
    return not any(i.stats.num_running + i.stats.num_waiting + i.stats.num_paused for i in snapshot.instances)


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
    common = [("tp2", FOLLOWER, "short"), ("tp2", LEADER, "long"), ("pp2", FOLLOWER, "long")]
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
        ("drop", "waved", LEADER),
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
    scene.require_equal(scene.short, running)
    assert scene.cluster.has_reached(victim)
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
    deadline_s = time.monotonic() + 10.0
    while not scene.cluster.has_reached(where):
        assert time.monotonic() < deadline_s, "the switch did not begin"
        time.sleep(0.005)
    scene.cluster.restart_controller()
    streams = scene.require_equal(scene.short, running)
    assert max(stream.longest_gap_s for stream in streams) < 1.0 + SERVES_WITHIN_S
    scene.require_recovery(after)
    assert [scene.cluster.pid(i) for i in NAMES] == pids
