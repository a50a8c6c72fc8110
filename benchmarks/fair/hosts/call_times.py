"""Counts in an instance what switching takes of its steps' time."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import numpy as np

from benchmarks.fair.hosts.times import PATH, Times
from pengserve.replicas.engine.tiers.residency import ResidentRequests
from pengserve.replicas.engine.tiers.shown_table import ShownTable
from pengserve.replicas.engine.tiers.tier_runner import TierRunner
from pengserve.replicas.kv import copies
from pengserve.replicas.kv.copies import CopyEngine
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.step_loop import StepLoop

_STEPS, _MANAGER, _WAITS, _COPIES = range(len(fields(Times)))


class _Counter:
    """Of the step thread, but for the copies. Within it is the manager's time, without what waits there."""

    def __init__(self, path: str) -> None:
        self.totals = np.memmap(path, dtype=np.float64, mode="r+")
        self._depth, self._started_s = 0, 0.0
        self._waited_s = 0.0  # in all, when the outermost call began

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._waited_s, self._started_s = self.totals[_WAITS], time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if not self._depth:
            waited_s = self.totals[_WAITS] - self._waited_s
            self.totals[_MANAGER] += time.perf_counter() - self._started_s - waited_s

    def managing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call of the manager."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self:
                return call(*args, **kwargs)

        return counted

    def choosing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call that gives what is around vLLM's scheduling: going in and coming out is the manager's time."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self:
                return _Around(self, call(*args, **kwargs))

        return counted

    def timed(self, total: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call whose time is part of this total."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.totals[total] += time.perf_counter() - started_s

        return counted

    def moving(self, call: Callable[..., int]) -> Callable[..., int]:
        """A call that moves blocks, and says in how many copies; of the copies' thread."""

        def counted(*args: Any, **kwargs: Any) -> int:
            num_copies = call(*args, **kwargs)
            self.totals[_COPIES] += num_copies
            return num_copies

        return counted


class _Around:
    """A context whose own work is the manager's."""

    def __init__(self, counter: _Counter, inner: AbstractContextManager[None]) -> None:
        self._counter, self._inner = counter, inner

    def __enter__(self) -> None:
        with self._counter:
            self._inner.__enter__()

    def __exit__(self, *exc: Any) -> bool | None:
        with self._counter:
            return self._inner.__exit__(*exc)


def count() -> None:
    """Counts from now on, if the environment says where."""
    if not (path := os.environ.get(PATH)):
        return
    counter = _Counter(path)
    StepLoop._step = counter.timed(_STEPS, StepLoop._step)  # type: ignore[method-assign]
    CopyEngine.wait = counter.timed(_WAITS, CopyEngine.wait)  # type: ignore[method-assign]
    ResidentRequests.choosing = counter.choosing(ResidentRequests.choosing)  # type: ignore[method-assign]
    for kind, name in ((ShownTable, "expect"), (ShownTable, "commit"), (TierRunner, "_map"), (TieredKv, "end_step")):
        setattr(kind, name, counter.managing(getattr(kind, name)))
    copies._move_by_runs = counter.moving(copies._move_by_runs)
    copies._move_by_rows = counter.moving(copies._move_by_rows)
