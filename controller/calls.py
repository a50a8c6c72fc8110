"""Calls to instances that are under way: at most one of a kind for each life, none of them waited for alone."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
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


class Calls:
    """Tasks by kind and life. A kind that has not been collected for a life is not begun again.

    `on_end` runs when a call that was begun as `news` ends, or when any call finds the instance gone: what should not
    wait for the next tick.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._tasks: dict[tuple[Call, InstanceKey], asyncio.Task[Any]] = {}
        self._on_end = on_end

    def under_way(self, call: Call, key: InstanceKey) -> bool:
        """Whether that call has been begun and has not ended."""
        task = self._tasks.get((call, key))
        return task is not None and not task.done()

    def begin(
        self, call: Call, key: InstanceKey, work: Callable[[], Coroutine[Any, Any, Any]], *, news: bool = True
    ) -> None:
        """Begins `work` unless that call is under way or waits to be collected."""
        if (call, key) in self._tasks:
            return
        task = asyncio.get_running_loop().create_task(work(), name=f"{call} {key}")
        task.add_done_callback(lambda done: self._ended(done, news))
        self._tasks[(call, key)] = task

    async def settle(self, timeout_s: float, *, patient: Iterable[tuple[Call, InstanceKey]] = ()) -> None:
        """Waits until all calls but the `patient` ones have ended, for `timeout_s` at most."""
        left_out = set(patient)
        tasks = [task for which, task in self._tasks.items() if which not in left_out]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    def collect(self) -> list[tuple[Call, InstanceKey, asyncio.Task[Any]]]:
        """The calls that have ended since the last time, in the order they were begun."""
        ended = [(call, key, task) for (call, key), task in self._tasks.items() if task.done()]
        for call, key, _ in ended:
            del self._tasks[(call, key)]
        return ended

    def forget(self, keep: Callable[[Call, InstanceKey], bool]) -> None:
        """Cancels the calls that `keep` refuses."""
        for which in [which for which in self._tasks if not keep(*which)]:
            self._tasks.pop(which).cancel()

    async def close(self) -> None:
        """Cancels all calls and waits for their ends."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any], news: bool) -> None:
        if not task.cancelled() and (news or isinstance(task.exception(), EngineError)):
            self._on_end()
