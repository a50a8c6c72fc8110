"""What the faults that are under way do to the world: who hears whom, what raises, how the disk and the clock are."""

import asyncio
import errno
import os
from collections import Counter
from random import Random

LATENCY_S = 0.002
SLOWEST_S = 4.0  # an answer of a slow Ray


class InjectedError(RuntimeError):
    """A one-off exception that a fault has put into a function."""


class Chaos:
    """Asked by all parts of the world before they act."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(f"chaos {seed}")
        self.wall_shift_s = 0.0
        self.is_ray_slow_until_s = 0.0
        self.armed: Counter[str] = Counter()
        self.free_bytes, self.bytes_a_call = 1 << 40, 1 << 40
        self._cut_until_s: dict[frozenset[str], float] = {}

    @property
    def now_s(self) -> float:
        """Virtual seconds."""
        return asyncio.get_running_loop().time()

    def wall_clock(self) -> float:
        """Seconds since the Unix epoch, as far as this machine knows."""
        return 1_800_000_000.0 + self.now_s + self.wall_shift_s

    # The network

    def cut(self, one: str, other: str, until_s: float) -> None:
        """Nothing passes between the two until then."""
        pair = frozenset((one, other))
        self._cut_until_s[pair] = max(self._cut_until_s.get(pair, 0.0), until_s)

    def heals_at_s(self, one: str, other: str) -> float:
        """When the two hear each other again; 0 where they do."""
        until_s = self._cut_until_s.get(frozenset((one, other)), 0.0)
        return until_s if until_s > self.now_s else 0.0

    async def travel(self, one: str, other: str) -> None:
        """The way of a call: it arrives when the network is whole."""
        await asyncio.sleep(LATENCY_S)
        while until_s := self.heals_at_s(one, other):  # noqa: ASYNC110
            await asyncio.sleep(until_s - self.now_s + LATENCY_S)

    async def ray(self) -> None:
        """The time that Ray takes for anything."""
        if self.now_s < self.is_ray_slow_until_s:
            await asyncio.sleep(self.rng.uniform(0.0, SLOWEST_S))

    # Exceptions

    def reach(self, point: str) -> None:
        """Raises InjectedError where the next call of `point` is meant to fail."""
        if self.armed[point]:
            self.armed[point] -= 1
            raise InjectedError(point)

    # The disk

    def write(self, file: int, data: memoryview) -> int:
        """Stands for `os.write`."""
        if self.armed["disk.write"]:
            self.armed["disk.write"] -= 1
            raise OSError(errno.EIO, "injected")
        num_bytes = min(len(data), self.free_bytes, self.bytes_a_call)
        if not num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.free_bytes -= num_bytes
        return os.write(file, data[:num_bytes])

    def heal(self) -> None:
        """Everything works from now on. The wall clock stays as wrong as it is."""
        self._cut_until_s.clear()
        self.armed.clear()
        self.is_ray_slow_until_s = 0.0
        self.free_bytes = self.bytes_a_call = 1 << 40
