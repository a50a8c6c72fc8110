"""The token deposit of a stream with steady pacing: tokens go to the client when they are due (OrbitFlow section 3.2).

It stands behind vLLM's output processor. So stop strings, logprobs and the end of an answer are found when a token
comes, not when it goes, and nothing is computed for tokens that no client will see. What comes of the wire below, such
as the death of an instance or a migration, only makes the deposit smaller for a while.

    put      an output of one token came: it is held until it is due
    get      what is due by now, as one output; as vLLM's own collector merges what a slow reader has not taken
    the end  of a sequence makes all of it due at once
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from pengserve.cluster.ingress.vllm_openai_seam import RequestOutput, RequestOutputCollector, RequestOutputKind
from pengserve.planners.deposit import Deposit

TIMER_S = 0.001  # what event loops round delays to


class DepositCollector(RequestOutputCollector):
    """Hands a request's outputs on when they are due."""

    def __init__(
        self,
        output_kind: RequestOutputKind,
        request_id: str,
        interval_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """One token of each sequence is due in every `interval_s`. Outputs must be deltas."""
        super().__init__(output_kind, request_id)
        assert self.aggregate, "only deltas can be held back"
        self._interval_s, self._clock = interval_s, clock
        self._deposits: dict[int, Deposit] = {}  # by the sequence's index
        self._held: deque[tuple[float, RequestOutput]] = deque()  # (due, output), in the order of coming
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, output: Any) -> None:
        """Takes what the output processor made. An error lets all that came before it go first."""
        now_s = self._clock()
        if isinstance(output, Exception):
            self._error = self._error or output
            self._hasten(None, now_s)
        else:
            due_s = max([self._due(each, now_s) for each in output.outputs], default=now_s)
            self._held.append((due_s, output))
            if output.finished:
                self._hasten(None, now_s)
            for each in output.outputs:
                if each.finish_reason is not None:
                    self._hasten(each.index, now_s)
        self.ready.set()

    def get_nowait(self) -> RequestOutput | None:
        """What is due by now, as one output; None where nothing is. Raises the error where there was one."""
        now_s = self._clock()
        found: RequestOutput | None = None
        later: deque[tuple[float, RequestOutput]] = deque()
        for due_s, output in self._held:
            if due_s > now_s:
                later.append((due_s, output))
            elif found is None:
                found = output
            else:
                found.add(output, aggregate=True)
        self._held = later
        if found is None and self._error is not None:
            raise self._error
        return found

    async def get(self) -> RequestOutput:
        """What is due next, when it is due."""
        while (output := self.get_nowait()) is None:
            self.ready.clear()
            self._set_timer()
            await self.ready.wait()
        return output

    def close(self) -> None:
        """The reader has gone."""
        if self._timer is not None:
            self._timer.cancel()
        super().close()

    @property
    def next_due_s(self) -> float | None:
        """When the next held output is due; None where none is held."""
        return min((due_s for due_s, _ in self._held), default=None)

    def _due(self, completion: Any, now_s: float) -> float:
        """When the last token of an output is due: no token goes early, so several of one step go with the last."""
        deposit = self._deposits.get(completion.index)
        if deposit is None:
            deposit = self._deposits[completion.index] = Deposit(self._interval_s)
        return max(deposit.add(len(completion.token_ids), now_s), default=now_s)

    def _hasten(self, index: int | None, now_s: float) -> None:
        """All that is held of a sequence, or of all, is due now."""
        self._held = deque(
            (now_s if index is None or any(each.index == index for each in output.outputs) else due_s, output)
            for due_s, output in self._held
        )

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self.next_due_s
        if due_s is not None:
            delay_s = math.ceil((due_s - self._clock()) / TIMER_S) * TIMER_S
            self._timer = asyncio.get_running_loop().call_later(max(TIMER_S, delay_s), self.ready.set)
