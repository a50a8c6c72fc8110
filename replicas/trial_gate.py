"""The gate of an instance: lets a request that may kill instances run where a death can have no other cause.

    comes --nothing is held--> let in
      |
      +--one is tried, or waits for it--> held, in order --the trial ends--> let in
      +--is to be tried alone--> held --all that runs is proven--> on trial --PROVEN_TOKENS, its end, TRIAL_S--> over

The gate belongs to the instance, because only the instance knows the requests of all ingresses.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from pengserve.planners.types.snapshot import InstanceStats

PROVEN_TOKENS = 8  # output tokens that one instance computes for a request before it counts as harmless there
PROVEN_STEPS = PROVEN_TOKENS  # without a new request, before all that runs counts as harmless
WAIT_S = 10.0  # a request to be tried alone goes on among the others when they are not proven by then
TRIAL_S = 10.0  # a trial is over by then: the request may wait for memory, or have a very long prompt


class Gated(Protocol):
    """What the gate needs of a request."""

    request_id: str


class Output(Protocol):
    """What a step made for one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: Any


R = TypeVar("R", bound=Gated)


@dataclass(slots=True)
class _Held(Generic[R]):
    request: R
    is_tried_alone: bool
    until_s: float  # the end of its wait


@dataclass(slots=True)
class _Trial(Generic[R]):
    request: R
    until_s: float
    num_tokens: int = 0  # that it has computed


class TrialGate(Generic[R]):
    """Belongs to the step thread. Costs an attribute check per request and per step while no request is to be tried."""

    def __init__(
        self,
        *,
        let_in: Callable[[R], None],
        tell: Callable[[R, bool], None],
        num_requests: Callable[[], int],
        is_reading: Callable[[], bool],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
            let_in: gives a request to what computes here.
            tell: tells a request's ingress that it is alone from now on, or (False) that it is not, or no longer.
            num_requests: requests that were let in and have not ended.
            is_reading: whether one of those waits, or has not computed its prompt.
        """
        self._let_in, self._tell, self._num_requests, self._is_reading = let_in, tell, num_requests, is_reading
        self._clock = clock
        self._held: deque[_Held[R]] = deque()
        self._trial: _Trial[R] | None = None
        self._num_steps = self._settled_step = 0  # steps, and how many there were when a request last began
        self._num_prompt_tokens = 0  # that were computed here, ever
        self.is_closed = False  # a request is on trial, or waits for that

    @property
    def num_held(self) -> int:
        """Requests that came and were not let in yet."""
        return len(self._held)

    def take(self, request: R, *, is_tried_alone: bool = False) -> None:
        """A request came: it is let in now or later."""
        if not is_tried_alone and not self.is_closed:
            self._settled_step = self._num_steps
            self._let_in(request)
            return
        self._held.append(_Held(request, is_tried_alone, self._clock() + WAIT_S))
        self.tend()

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests are wanted no more."""
        if not self.is_closed:
            return
        ids = set(request_ids)
        self._held = deque(held for held in self._held if held.request.request_id not in ids)
        if self._trial is not None and self._trial.request.request_id in ids:
            self._trial = None
        self.tend()

    def stepped(self, outputs: Iterable[Output], stats: InstanceStats) -> None:
        """The instance has made a step, with these outputs and the load after it."""
        self._num_steps += 1
        if stats.num_waiting or stats.total_prompt_tokens != self._num_prompt_tokens:
            self._settled_step, self._num_prompt_tokens = self._num_steps, stats.total_prompt_tokens
        if self.is_closed:
            self._count(outputs)
            self.tend()

    def requests_moved(self) -> None:
        """Requests may have come from other instances, or have left for them: nothing here is proven."""
        self._settled_step = self._num_steps
        if self._trial is not None:
            self._end_trial()
        self.tend()

    def tend(self) -> None:
        """Ends what took too long, and lets in what may go on."""
        while not self._is_trial_on() and self._held:
            held = self._held[0]
            is_alone = held.is_tried_alone and self._is_proven()
            if held.is_tried_alone and not is_alone and self._clock() < held.until_s:
                break
            self._held.popleft()
            if is_alone:
                self._trial = _Trial(held.request, self._clock() + TRIAL_S)
            else:
                self._settled_step = self._num_steps
            if held.is_tried_alone:
                self._tell(held.request, is_alone)  # before it can do harm
            self._let_in(held.request)
        self.is_closed = self._trial is not None or bool(self._held)

    def _is_trial_on(self) -> bool:
        if self._trial is None:
            return False
        if not self._num_requests():  # it is not here any more
            self._trial = None
        elif self._clock() >= self._trial.until_s:
            self._end_trial()
        return self._trial is not None

    def _end_trial(self) -> None:
        """The request goes on, no longer alone."""
        assert self._trial is not None
        request, self._trial = self._trial.request, None
        self._settled_step = self._num_steps
        self._tell(request, False)

    def _count(self, outputs: Iterable[Output]) -> None:
        """Ends the trial of a request that has computed enough, or ended."""
        trial = self._trial
        if trial is None:
            return
        for output in outputs:
            if output.request_id == trial.request.request_id:
                trial.num_tokens += len(output.new_token_ids)
                if output.finish_reason is not None or trial.num_tokens >= PROVEN_TOKENS:
                    self._trial = None

    def _is_proven(self) -> bool:
        """Whether all that runs here has computed enough to count as harmless."""
        if not self._num_requests():
            return True
        if self._is_reading():
            self._settled_step = self._num_steps
        return self._num_steps - self._settled_step >= PROVEN_STEPS
