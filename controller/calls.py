"""Calls to instances that are under way: at most one of a kind for each life, none of them waited for alone."""

import asyncio
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any, NamedTuple

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


class Begun(NamedTuple):
    """A call that has been begun and not collected."""

    task: asyncio.Task[Any]
    begun_s: float


class Calls:
    """Tasks by kind and life. A kind that has not been collected for a life is not begun again.

    `on_end` runs when a call that was begun as `news` ends, or when any call finds the instance gone: what should not
    wait for the next tick.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._begun: dict[tuple[Call, InstanceKey], Begun] = {}
        self._on_end = on_end
        # Of `settle`: what it waits for still, and what wakes it. One count for all of them, since `asyncio.wait` adds
        # and removes a callback of its own for each of a thousand tasks.
        self._awaited: set[asyncio.Task[Any]] = set()
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
    ) -> None:
        """Begins `work` at `now_s` unless that call is under way or waits to be collected."""
        which = call, key
        if which in self._begun:
            return
        task = asyncio.get_running_loop().create_task(work())
        task.add_done_callback(self._ended_as_news if news else self._ended)
        self._begun[which] = Begun(task, now_s)

    async def settle(self, timeout_s: float, is_patient: Callable[[Call, InstanceKey], bool]) -> None:
        """Waits until all calls have ended that are not patient, for `timeout_s` at most."""
        self._awaited = {task for which, (task, _) in self._begun.items() if not task.done() and not is_patient(*which)}
        if not self._awaited:
            return
        self._settled = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled
        except TimeoutError:
            pass  # who is silent is asked again
        finally:
            self._awaited, self._settled = set(), None

    def collect(self) -> list[tuple[Call, InstanceKey, asyncio.Task[Any]]]:
        """The calls that have ended since the last time, in the order they were begun."""
        ended = [(call, key, task) for (call, key), (task, _) in self._begun.items() if task.done()]
        if len(ended) == len(self._begun):
            self._begun.clear()
        else:
            for call, key, _ in ended:
                del self._begun[(call, key)]
        return ended

    def forget(self, is_old: Callable[[Call, InstanceKey, float], bool]) -> None:
        """Cancels the calls that are old, by kind, life and when they were begun."""
        for which in [which for which, begun in self._begun.items() if is_old(*which, begun.begun_s)]:
            self._begun.pop(which).task.cancel()

    async def close(self) -> None:
        """Cancels all calls and waits for their ends."""
        tasks = [begun.task for begun in self._begun.values()]
        self._begun.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and isinstance(task.exception(), EngineError):
            self._on_end()
        self._count_down(task)

    def _ended_as_news(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            self._on_end()
        self._count_down(task)

    def _count_down(self, task: asyncio.Task[Any]) -> None:
        self._awaited.discard(task)
        if not self._awaited and self._settled is not None and not self._settled.done():
            self._settled.set_result(None)
