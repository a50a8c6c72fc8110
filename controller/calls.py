"""Calls to instances that are under way: at most one of a kind for each life, none of them waited for alone."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from enum import StrEnum
from functools import partial
from types import CoroutineType
from typing import Any, NamedTuple

from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.ids import InstanceKey


class CallKind(StrEnum):
    """Kinds of calls."""

    CREATE = "create"
    STATUS = "status"
    CONNECT = "connect"
    DRAIN = "drain"
    RETIRE = "retire"
    ORDER = "order"
    KILL = "kill"

    __hash__ = str.__hash__  # a thousand look-ups a tick: the enum's own is not computed in C


End = tuple[CallKind, InstanceKey, Any, BaseException | None]
"""How a call of a life has ended: what it returned, or what it raised."""


class _Begun(NamedTuple):
    """A call that has been begun and not collected."""

    task: asyncio.Task[Any]
    begun_s: float
    is_patient: bool


class Calls:
    """Tasks by kind and life. A kind that has not been collected for a life is not begun again.

    `on_end` runs when a call that was begun as `news` ends, or when any call finds the instance gone that the tick does
    not wait for, or no longer: what should not wait for the next tick.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._begun: dict[tuple[CallKind, InstanceKey], _Begun] = {}
        self._at_once: list[End] = []
        self._late: set[asyncio.Task[Any]] = set()  # those that `settle` has waited for in vain
        self._on_end = on_end

    def under_way(self, call: CallKind, key: InstanceKey) -> bool:
        """Whether that call has been begun and has not ended."""
        begun = self._begun.get((call, key))
        return begun is not None and not begun.task.done()

    def begin(
        self,
        call: CallKind,
        key: InstanceKey,
        work: Callable[[InstanceKey], Coroutine[Any, Any, Any]],
        now_s: float = 0.0,
        *,
        news: bool = True,
        patient: bool = False,
    ) -> None:
        """Begins `work` of `key` at `now_s` unless that call is under way or waits to be collected.

        No tick waits for a `patient` call.
        """
        if (call, key) in self._begun:
            return
        task = asyncio.get_running_loop().create_task(work(key))
        self._begun[call, key] = _Begun(task, now_s, patient)
        if news or patient:
            task.add_done_callback(partial(self._ended, news))

    def begin_all(
        self,
        call: CallKind,
        keys: Sequence[InstanceKey],
        work: Callable[[Sequence[InstanceKey]], Sequence[Any]],
        now_s: float,
    ) -> None:
        """As `begin` for each of `keys`, where no end is news and `settle` waits: it sees their ends by itself.

        `work` gives for each key a coroutine, or what that would return: an end that is there at once.
        """
        begun, create_task = self._begun, asyncio.get_running_loop().create_task
        if begun:
            keys = [key for key in keys if (call, key) not in begun]
        for key, found in zip(keys, work(keys), strict=True):
            if type(found) is CoroutineType:
                begun[call, key] = _Begun(create_task(found), now_s, False)
            else:
                self._at_once.append((call, key, found, None))

    async def settle(self, timeout_s: float) -> None:
        """Waits until all calls have ended that are not patient, for `timeout_s` at most."""
        if not any(not begun.is_patient and not begun.task.done() for begun in self._begun.values()):
            return
        await asyncio.sleep(0)  # who answers at once has done so then
        waiting = [begun.task for begun in self._begun.values() if not begun.task.done() and not begun.is_patient]
        if not waiting:
            return
        _, silent = await asyncio.wait(waiting, timeout=timeout_s)  # who is silent is asked again
        for task in silent - self._late:
            self._late.add(task)
            task.add_done_callback(self._late.discard)
            task.add_done_callback(partial(self._ended, False))

    def collect(self) -> list[End]:
        """The calls that have ended since the last time: those that had at once, then in the order they were begun."""
        ended, self._at_once = self._at_once, []
        tasks = [(which, begun.task) for which, begun in self._begun.items() if begun.task.done()]
        for which, task in tasks:
            del self._begun[which]
            error = task.exception()
            ended.append((*which, task.result() if error is None else None, error))
        return ended

    def forget(self, is_old: Callable[[CallKind, InstanceKey, float], bool]) -> None:
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

    def _ended(self, is_news: bool, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (is_news or isinstance(task.exception(), EngineError)):
            self._on_end()
