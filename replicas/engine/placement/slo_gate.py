"""Holds new prompts back where they would break the time per output token of requests that decode (LayerKV 3.1).

`planners/slo_admission.py` decides; here it is told what a token and a prompt take on this instance, by the steps that
were made. Nothing is done while no request here has an SLO for its tokens.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from pengserve.planners.slo_admission import Decoding, PrefillCost, num_prefills, worth_waiting_for
from pengserve.planners.types.contract import Contract
from pengserve.replicas.engine.scheduling.long_answers import Paces
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.vllm_seam import Request

MAX_HELD_S = 10.0  # no prompt is held back longer: none starves
LEARN = 0.2  # weight of the newest step


class Contracts(Paces, Protocol):
    """Who knows the contracts of requests, and what they have in store: `replicas/contracts.py`."""

    def contract(self, request_id: str) -> Contract:
        """What holds for a request."""

    @property
    def num_paced(self) -> int:
        """Requests here that have an SLO for the time between tokens."""

    def deposit_tokens(self, request_id: str) -> int:
        """Tokens of a request that its client has not been sent yet (`replicas/deposits.py`)."""


@dataclass(slots=True)
class Pace:
    """What steps take here, learned from each of them."""

    tpot_s: float | None = None  # a step without prompts; None: there was none yet
    token_s: float | None = None  # a token of a prompt, beyond that

    def learn(self, took_s: float, prompt_tokens: int, num_in_flight: int = 1) -> None:
        """A step took so long, and computed so many tokens of prompts.

        Args:
            num_in_flight: steps that a request waits for between two of its tokens: microbatches of a pipeline.
        """
        if prompt_tokens <= 0:
            self.tpot_s = _blend(self.tpot_s, num_in_flight * took_s)
        else:
            without_s = (self.tpot_s or 0.0) / num_in_flight
            self.token_s = _blend(self.token_s, max(0.0, took_s - without_s) / prompt_tokens)


class SloGate:
    """Belongs to the step thread."""

    def __init__(
        self, scheduler: SchedulerHandle, contracts: Contracts, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._scheduler, self._contracts, self._clock = scheduler, contracts, clock
        self._pace = Pace()
        self._began: dict[str, tuple[float, int]] = {}  # since when a request decodes here, and its tokens then
        self._held: tuple[str, float] | None = None  # the first prompt that is held back, and since when
        self.num_held_steps = 0  # in which a prompt was held back

    @property
    def is_on(self) -> bool:
        """Whether a request here has an SLO for its tokens."""
        return self._contracts.num_paced > 0

    @property
    def tpot_s(self) -> float | None:
        """Seconds between two tokens of a request, in steps without prompts; None: there was none yet."""
        return self._pace.tpot_s

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Within it vLLM schedules and runs one step, with as many new prompts as the SLOs allow."""
        limiting = self.limiting()
        before, started_s = self.unread_tokens(), self._clock()
        with limiting:
            yield
        self._pace.learn(self._clock() - started_s, before - self.unread_tokens())

    def limiting(self) -> contextlib.AbstractContextManager[None]:
        """Within it vLLM schedules as many new prompts as the SLOs allow. What that took is for `learn` to say."""
        num_new = self.num_new()
        return contextlib.nullcontext() if num_new is None else self._scheduler.limited(num_new=num_new)

    def prefill_s(self, num_tokens: int) -> float | None:
        """Seconds that a prompt of so many tokens takes here; None: none was measured."""
        token_s = self._pace.token_s
        return None if token_s is None else PrefillCost(token_s=token_s).prefill_s(num_tokens)

    def learn(self, took_s: float, prompt_tokens: int, num_in_flight: int) -> None:
        """A microbatch took so long in a stage; see `Pace.learn`."""
        self._pace.learn(took_s, prompt_tokens, num_in_flight)

    def unread_tokens(self) -> int:
        """Tokens of prompts that are not computed yet, of all requests here."""
        return self._scheduler.prefilling_tokens() + self._scheduler.queued_tokens()

    def num_new(self) -> int | None:
        """Prompts that may begin now, in their order; None: all."""
        pace, slots = self._pace, self._scheduler.new_slots
        waiting, decoding = list(itertools.islice(self._scheduler.waiting, slots)), self._decoding()
        if not waiting or not decoding or pace.tpot_s is None or pace.token_s is None:
            self._held = None
            return None
        cost = PrefillCost(token_s=pace.token_s)
        prefills_s = [cost.prefill_s(request.num_tokens) for request in waiting]
        begun_s = cost.prefill_s(self._scheduler.prefilling_tokens())
        count = num_prefills(prefills_s, worth_waiting_for(decoding, pace.tpot_s), pace.tpot_s, begun_s)
        if count == len(waiting):
            self._held = None
            return None
        return count + self._is_overdue(waiting[count])

    def _is_overdue(self, first: Request) -> bool:
        """Whether the first prompt that does not fit has been held back for too long."""
        now_s = self._clock()
        if self._held is None or self._held[0] != first.request_id:
            self._held = (first.request_id, now_s)
        self.num_held_steps += 1
        return now_s - self._held[1] >= MAX_HELD_S

    def _decoding(self) -> list[Decoding]:
        """Running requests with an SLO that have made a token here."""
        now_s, found = self._clock(), []
        running = self._scheduler.running
        here = {request.request_id for request in running}
        for request_id in [i for i in self._began if i not in here and not self._scheduler.knows(i)]:
            del self._began[request_id]
        for request in running:
            contract = self._contracts.contract(request.request_id)
            if contract.slo is None or contract.slo.tbt_s is None or not request.num_output_tokens:
                continue
            since_s, tokens = self._began.setdefault(request.request_id, (now_s, request.num_output_tokens))
            found.append(
                Decoding(
                    slo_s=contract.slo.tbt_s,
                    past_tokens=request.num_output_tokens - tokens,
                    past_s=now_s - since_s,
                    future_tokens=contract.low_tokens - request.num_output_tokens,
                )
            )
        return found


def _blend(before: float | None, newest: float) -> float:
    return newest if before is None else before + LEARN * (newest - before)
