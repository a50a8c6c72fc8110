"""What tests of faults do: send streams, wait for a death, and see that nothing of it shows."""

import os
import random
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceState
from tests.support.elastic import ElasticCluster
from tests.support.speed import slowness
from tests.support.traffic import TimedStream, Traffic

SERVES_WITHIN_S = 5.0
ENDS_WITHIN_S = 400.0
MAX_TOKENS = 250


class Scene:
    """An elastic cluster, its traffic, and what each request gives when nothing happens."""

    def __init__(self, cluster: ElasticCluster, traffic: Traffic) -> None:
        self.cluster, self.traffic = cluster, traffic
        self.ids = range(cluster.config.num_instances)
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
        deadline_s = time.monotonic() + 240.0
        while not begun(stream.times_s for stream in live):
            assert time.monotonic() < deadline_s, "the streams did not begin"
            time.sleep(0.002)
        return futures

    def require_equal(self, requests: list[dict[str, Any]], futures: "list[Future[TimedStream]]") -> list[TimedStream]:
        """Waits for the streams; they are what they are undisturbed."""
        streams = [future.result(ENDS_WITHIN_S) for future in futures]
        assert [stream.error for stream in streams] == [""] * len(streams)
        for i, (stream, expected) in enumerate(zip(streams, self._expected[id(requests)], strict=True)):
            assert stream.token_ids == expected.token_ids, (
                f"stream {i}: {len(stream.token_ids)} of {len(expected.token_ids)} tokens, equal up to"
                f" {_num_equal(stream.token_ids, expected.token_ids)}: {requests[i]}"
            )
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
        assert took_s < SERVES_WITHIN_S * slowness() * max(1.0, crowd), (
            f"the survivors answered {took_s:.1f} s after the fault"
        )

    def require_memory(self, *instance_ids: int) -> None:
        """Conservation laws of instances."""
        self.cluster.require_memory(*instance_ids)

    def require_recovery(self, wanted: str) -> None:
        """The layout is what was asked for, nothing is left over, and the next switch works."""
        self.cluster.wait(_shape_is(wanted), timeout_s=400.0)
        self.cluster.wait_formable()
        self.cluster.wait(nothing_runs, timeout_s=120.0)
        self.require_memory(*self.ids)
        other = "tp2" if wanted == "dp" else "dp"
        self.cluster.set_layout(other)
        assert self.traffic.start([5, 6, 7], max_tokens=4).result(ENDS_WITHIN_S).error == ""
        self.require_memory(*self.ids)

    def wait_dead(self, pid: int, timeout_s: float = 240.0) -> float:
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


def nothing_runs(snapshot: ClusterSnapshot) -> bool:
    """Whether no instance has a request."""
    return not any(i.stats.num_running + i.stats.num_waiting + i.stats.num_paused for i in snapshot.instances)


def _num_equal(first: list[int], second: list[int]) -> int:
    """Tokens before the first that differs."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
