"""How long chosen methods take while something runs: no profiler, a microsecond a call."""

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Target = tuple[Any, str, str]
"""An object, class or module; the name of a function of it; the part that it counts to."""


@contextmanager
def timed_calls(targets: list[Target]) -> Iterator[dict[str, float]]:
    """Adds up the seconds spent in `targets` by part, for as long as it is open. Whoever wants to may clear them."""
    spent: dict[str, float] = defaultdict(float)
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in targets]
    for owner, name, part in targets:
        setattr(owner, name, _timed(getattr(owner, name), spent, part))
    try:
        yield spent
    finally:
        for owner, name, act in before:
            setattr(owner, name, act)


def _timed(act: Callable[..., Any], spent: dict[str, float], part: str) -> Callable[..., Any]:
    async def timed_later(*args: Any, **more: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return await act(*args, **more)
        finally:
            spent[part] += time.perf_counter() - start_s

    def timed(*args: Any, **more: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return act(*args, **more)
        finally:
            spent[part] += time.perf_counter() - start_s

    return timed_later if inspect.iscoroutinefunction(act) else timed
