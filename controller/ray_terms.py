"""Terms of controllers in Ray's key-value store.

    pengserve:{app}:term:{number} -> 1
    pengserve:{app}:acting -> the newest sign of life of the controller that acts

The store has no compare-and-swap, but it puts a key that is not there yet exactly once: who puts the key has the term.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

CALL_TIMEOUT_S = 10.0  # of Ray's control service, which the calls block on

T = TypeVar("T")


class RayTermStore:
    """`TermStore` of one application on the Ray cluster. Its keys stay until the cluster ends."""

    def __init__(self, app: str, namespace: str) -> None:
        self._prefix, self._sign, self._namespace = f"pengserve:{app}:term:", f"pengserve:{app}:acting", namespace

    async def claim(self, above: int) -> int:
        """Puts the key of the next number that is free. Raises TimeoutError."""
        return await _in_thread(lambda: self._claim(above))

    async def newest(self) -> int:
        """The highest number there is a key for. Raises TimeoutError."""
        return await _in_thread(lambda: max(self._numbers(), default=0))

    async def live(self, sign: str) -> None:
        """Overwrites the sign. Raises TimeoutError."""
        await _in_thread(lambda: _internal_kv_put(self._sign, sign, overwrite=True, namespace=self._namespace))

    async def sign_of_life(self) -> str:
        """The newest sign. Raises TimeoutError."""
        found: bytes | None = await _in_thread(lambda: _internal_kv_get(self._sign, namespace=self._namespace))
        return (found or b"").decode()

    def _claim(self, above: int) -> int:
        while True:
            older = self._numbers()
            number = max([above, *older]) + 1
            existed = _internal_kv_put(f"{self._prefix}{number}", b"1", overwrite=False, namespace=self._namespace)
            # Where another controller went further in between, its keys may have taken the place of this one.
            if not existed and max(self._numbers(), default=0) == number:
                for old in older:
                    _internal_kv_del(f"{self._prefix}{old}", namespace=self._namespace)
                return number

    def _numbers(self) -> list[int]:
        keys: list[bytes] = _internal_kv_list(self._prefix, namespace=self._namespace)
        tails = [key.decode().removeprefix(self._prefix) for key in keys]
        return [int(tail) for tail in tails if tail.isdecimal()]


async def _in_thread(work: Callable[[], T]) -> T:
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return await asyncio.to_thread(work)
