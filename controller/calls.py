"""Calls to instances that are under way: at most one of a kind for each life, none of them waited for alone."""

import asyncio
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any

from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.ids import InstanceKey


class Call(StrEnum):
    """Kinds of calls."""

    CREATE = "create"
    STATUS = "status"
    CONNECT = "connect"
    DRAIN = "drain"
    KILL = "kill"

    __hash__ = str.__hash__  # a thousand look-ups a tick: the enum's own is not computed in C


class _Begun:
    """A call that has been begun and not collected."""

    __slots__ = ("begun_s", "is_awaited", "is_patient", "task")

    def __init__(self, begun_s: float, is_patient: bool) -> None:
        self.begun_s, self.is_patient = begun_s, is_patient
        self.is_awaited = False  # `settle` waits for it
        self.task: asyncio.Task[Any]


class Calls:
    """Tasks by kind and life. A kind that has not been collected for a life is not begun again.

    `on_end` runs when a call that was begun as `news` ends, or when any call finds the instance gone: what should not
    wait for the next tick.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._begun: dict[tuple[Call, InstanceKey], _Begun] = {}
        self._on_end = on_end
        # What `settle` waits for, counted by the calls themselves: a thousand callbacks of `asyncio.wait` are slow.
        self._num_awaited = 0
        self._settled: asyncio.Future[None] | None = None

    def under_way(self, call: Call, key: InstanceKey) -> bool:
        """Whether that call has been begun and has not ended."""
        begun = self._begun.get((call, key))
        return begun is not None and not begun.task.done()

    def begin(
        self,
        call: Call,
        key: InstanceKey,
        work: Callable[[], Coroutine[Any, Any, Any]],
        now_s: float = 0.0,
        *,
        news: bool = True,
        patient: bool = False,
    ) -> None:
        """Begins `work` at `now_s` unless that call is under way or waits to be collected.

        A `patient` one is waited for by nobody.
        """
        which = call, key
        if which in self._begun:
            return
        begun = self._begun[which] = _Begun(now_s, patient)
        begun.task = asyncio.get_running_loop().create_task(self._run(begun, work, news))

    async def settle(self, timeout_s: float) -> None:
        """Waits until all calls have ended that are not patient, for `timeout_s` at most."""
        for begun in self._begun.values():
            if not begun.is_patient and not begun.task.done():
                begun.is_awaited = True
                self._num_awaited += 1
        if not self._num_awaited:
            return
        self._settled = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled
        except TimeoutError:
            pass  # who is silent is asked again
        finally:
            for begun in self._begun.values():
                begun.is_awaited = False
            self._num_awaited, self._settled = 0, None

    def collect(self) -> list[tuple[Call, InstanceKey, asyncio.Task[Any]]]:
        """The calls that have ended since the last time, in the order they were begun."""
        ended = [(call, key, begun.task) for (call, key), begun in self._begun.items() if begun.task.done()]
        if len(ended) == len(self._begun):
            self._begun.clear()
        else:
            for call, key, _ in ended:
                del self._begun[(call, key)]
        return ended

    def forget(self, is_old: Callable[[Call, InstanceKey, float], bool]) -> None:
        """Cancels the calls that are old, by kind, life and when they were begun."""
        for which in [which for which, begun in self._begun.items() if is_old(*which, begun.begun_s)]:
            begun = self._begun.pop(which)
            begun.task.cancel()
            self._count_down(begun)  # one that has not run yet never says that it ends

    async def close(self) -> None:
        """Cancels all calls and waits for their ends."""
        tasks = [begun.task for begun in self._begun.values()]
        self._begun.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, begun: _Begun, work: Callable[[], Coroutine[Any, Any, Any]], news: bool) -> Any:
        is_news = False
        try:
            result = await work()
            is_news = news
            return result
        except Exception as error:
            is_news = news or isinstance(error, EngineError)
            raise
        finally:
            if is_news:
                self._on_end()
            self._count_down(begun)

    def _count_down(self, begun: _Begun) -> None:
        if begun.is_awaited:
            begun.is_awaited = False
            self._num_awaited -= 1
            if not self._num_awaited and self._settled is not None and not self._settled.done():
                self._settled.set_result(None)
