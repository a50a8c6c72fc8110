"""Turns of requests that were parked for long: which of them are as urgent as their age makes them."""

from collections.abc import Callable, Sequence

from pengserve.planners.preemption import QUANTUM_TOKENS, Aged, plan_turns
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.vllm_seam import Request


class Turns:
    """Belongs to the step thread. A turn lasts from a request's coming back until it has made some tokens."""

    def __init__(self, scheduler: SchedulerHandle, num_blocks: Callable[[Request], int]) -> None:
        """`num_blocks`: that hold a request's KV."""
        self._scheduler, self._num_blocks = scheduler, num_blocks
        self._came_back: dict[str, tuple[int, int]] = {}  # tokens that a request had when it last did so, and its band
        self._chosen: frozenset[str] = frozenset()  # parked requests that have a turn now

    def come_back(self, request: Request, band: int) -> None:
        """A parked request goes on; `band`: by which it got its place."""
        self._forget_gone()
        self._came_back[request.request_id] = (request.num_tokens, band)

    def is_under_way(self, request: Request) -> bool:
        """Whether it has made few tokens since it came back last."""
        since = self._came_back.get(request.request_id)
        return since is not None and request.num_tokens < since[0] + QUANTUM_TOKENS

    def choose(self, parked: Sequence[tuple[Request, int]], here: Sequence[Request], num_blocks: int) -> None:
        """Gives turns for the next step.

        Args:
            parked: requests, and the bands that their age gives them.
            here: requests that run.
            num_blocks: of the device.
        """
        aged = [self._aged(r, band) for r, band in parked if band < r.priority]
        under_way = [self._aged(r, r.priority) for r in here if self.is_under_way(r)] if aged else []
        self._chosen = plan_turns(aged, under_way, self._scheduler.max_running, num_blocks)

    def band(self, request: Request, aged: int) -> int:
        """How urgent a request is in the next step, whose band would be `aged` by its age."""
        if self.is_under_way(request):
            return min(request.priority, self._came_back[request.request_id][1])
        return aged if request.request_id in self._chosen else request.priority

    def _forget_gone(self) -> None:
        if len(self._came_back) > 2 * self._scheduler.max_running:
            self._came_back = {i: since for i, since in self._came_back.items() if self._scheduler.knows(i)}

    def _aged(self, request: Request, band: int) -> Aged:
        return Aged(
            request_id=request.request_id, band=band, tag=request.arrival_time, num_blocks=self._num_blocks(request)
        )
