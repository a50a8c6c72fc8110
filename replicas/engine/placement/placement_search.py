"""The search for a placement beside the steps, in a thread of its own (OrbitFlow section 3.4)."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from pengserve.planners.placement.values import Decode, Machine, PlacementConfig, Solution
from pengserve.planners.placement.worth import solve_where_it_pays
from pengserve.planners.types.errors import one_line

logger = logging.getLogger(__name__)

Solve = Callable[[Sequence[Decode], Machine, PlacementConfig], Solution]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A search that has ended."""

    solution: Solution | None  # None: it failed
    reason: str  # why it began
    took_s: float
    failure: str = ""


class PlacementSearch:
    """One search at a time. The thread is there from the first one on."""

    def __init__(self, solver: Solve = solve_where_it_pays) -> None:
        self._solve = solver
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: Future[Searched] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a search has begun, and `take` has not returned what it found."""
        return self._under_way is not None

    def begin(self, requests: Sequence[Decode], machine: Machine, config: PlacementConfig, reason: str) -> None:
        """Begins a search; not while one is under way."""
        assert not self.is_busy, "one search at a time"
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="placement")
        self._under_way = self._threads.submit(self._run, requests, machine, config, reason)

    def take(self) -> Searched | None:
        """What the search has found, once, if it has ended. Never waits."""
        if self._under_way is None or not self._under_way.done():
            return None
        found, self._under_way = self._under_way.result(), None
        return found

    def close(self) -> None:
        """Ends the thread after the search that is under way, whose result is lost. Another search begins another."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._threads = self._under_way = None

    def _run(self, requests: Sequence[Decode], machine: Machine, config: PlacementConfig, reason: str) -> Searched:
        started_s = time.perf_counter()
        try:
            solution, failure = self._solve(requests, machine, config), ""
        except Exception as error:
            logger.exception("the search for a placement of KV failed; what is in force stays")
            solution, failure = None, one_line(error)
        return Searched(solution=solution, reason=reason, took_s=time.perf_counter() - started_s, failure=failure)
