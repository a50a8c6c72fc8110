"""One lane in virtual time: it schedules a step, lets its time pass, gives out its tokens, and schedules the next.

    schedule -- step -- finish | schedule -- step -- finish | ...
                               boundary: requests leave, pauses and stalls begin, the next step is chosen

Where the scheduler says that many equal steps follow each other they are one event. A call in the middle cuts them:
steps that have ended are finished, the one under way goes on alone, and after it all is scheduled anew. So a cut
changes nothing but the number of events.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from pengserve.planners.redirect import choose_redirected
from pengserve.planners.types.step_cost import StepTotals
from pengserve.simulator.engine.gaps import GapCounter
from pengserve.simulator.engine.scheduler import LaneScheduler, SimStep
from pengserve.simulator.requests import LiveRequest
from pengserve.simulator.timing.steps import Batch, StepTimes

MANY = 1 << 30  # more steps than anything lasts


@dataclass(slots=True)
class Flight:
    """Steps that were begun and have not ended."""

    step: SimStep
    begin_s: float  # computing begins, after swapping
    num_steps: int
    end_s: float


class SimLane:
    """Belongs to the event loop that runs when it is built. Times are that loop's.

    Writes `LiveRequest` times and longest gaps. What is asked for at one moment happens in the order of asking.
    """

    def __init__(
        self,
        scheduler: LaneScheduler,
        times: StepTimes,
        *,
        on_end: Callable[[Sequence[LiveRequest]], None],
        on_step: Callable[[], None] | None = None,
        gaps: GapCounter | None = None,
        swap_s: Callable[[int, int], float] | None = None,
    ) -> None:
        """A lane without requests.

        Args:
            on_end: hears of requests that have their last token, at a step boundary.
            on_step: is called whenever steps have ended.
            gaps: counts all gaps between tokens.
            swap_s: seconds that a step waits for so many bytes to the host and so many from it; None: none.
        """
        self.scheduler, self.times = scheduler, times
        self.last_step_s = 0.0  # of the newest step that has ended
        self.busy_s = 0.0  # of all steps that have ended
        self.work = StepTotals()
        self.gaps = gaps if gaps is not None else GapCounter()
        self._on_end, self._on_step, self._swap_s = on_end, on_step, swap_s
        self._loop = asyncio.get_running_loop()
        self._flights: deque[Flight] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._ready_s = 0.0  # nothing begins before
        self._is_paused = self._is_at_boundary = self._is_closed = False
        self._pausing: list[asyncio.Future[None]] = []
        self._leaving: list[LiveRequest] = []  # as soon as they are in no unfinished step

    @property
    def is_paused(self) -> bool:
        """Whether no step may begin."""
        return self._is_paused

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way."""
        return not self._flights

    # Requests --------------------------------------------------------------------------------------------------------

    def add(self, request: LiveRequest) -> None:
        """Queues a request. See `LaneScheduler.add`."""
        scheduler = self.scheduler
        # Who comes last to a queue changes nothing for the steps under way.
        is_last = scheduler.options.policy == "fcfs" and not request.num_generated and scheduler.queued_tokens > 0
        if not is_last:
            self._cut()
        scheduler.add(request)
        self._wake()

    def admit(self, request: LiveRequest, computed_tokens: int) -> bool:
        """Takes a request with its KV; False without room. See `LaneScheduler.admit`."""
        self._cut()
        if not self.scheduler.admit(request, computed_tokens):
            return False
        self._wake()
        return True

    def remove(self, requests: Collection[LiveRequest]) -> None:
        """Lets requests go: at once, or at the end of the step in which they are. Unknown ones are left alone."""
        self._cut()
        bound = self._bound()
        self._leaving += [request for request in requests if request in bound]
        self.scheduler.remove([request for request in requests if request not in bound])
        self._wake()

    def redirect(self, max_tokens: int) -> list[LiveRequest]:
        """Lets waiting requests go that are in no step, of so many tokens at most."""
        self._cut()
        bound, scheduler = self._bound(), self.scheduler
        waiting = [r for r in scheduler.waiting if r not in bound]
        found = choose_redirected(((r, r.num_tokens, scheduler.cached_tokens(r)) for r in waiting), max_tokens)
        scheduler.remove(found)
        self._wake()
        return found

    def _bound(self) -> set[LiveRequest]:
        """Requests that are in an unfinished step."""
        return {request for flight in self._flights for request in flight.step.requests}

    def resize(self, num_blocks: int) -> bool:
        """Grows or shrinks the pool; False where more blocks are in use. See `LaneScheduler.resize`."""
        self._cut()
        done = self.scheduler.resize(num_blocks)
        self._wake()
        return done

    # Pausing ---------------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Returns at the next step boundary. Until `resume`, no step begins; requests may come and go."""
        self._cut()
        self._is_paused = True
        if self._flights:
            waiter = self._loop.create_future()
            self._pausing.append(waiter)
            await waiter

    def resume(self) -> None:
        """Ends a pause."""
        self._is_paused = self._is_closed
        self._wake()

    def stall(self, seconds: float) -> None:
        """Nothing runs for so long, from the next step boundary on. Counts as stalled time of all that hold KV."""
        self._cut()
        after_s = self._flights[-1].end_s if self._flights else self._loop.time()
        self._ready_s = max(self._ready_s, after_s) + seconds
        for request in self.scheduler.running:
            request.stalls_s += seconds
        self._wake()

    def close(self) -> None:
        """Its instance is gone: what is under way never ends, and nothing runs here any more."""
        self._is_closed = self._is_paused = True
        self._flights.clear()
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._pausing:
            waiter.cancel()

    def catch_up(self) -> None:
        """Finishes all steps that have ended by now, so that the scheduler shows what is true now."""
        self._cut(MANY)

    # Steps -----------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Begins what can begin, where nothing is under way."""
        if not self._flights and not self._is_at_boundary:
            self._fill(self._loop.time())

    def _fill(self, now_s: float, max_steps: int = MANY) -> None:
        """Begins what can begin at `now_s`."""
        if self._is_paused or self._must_wait(now_s):
            return
        step = self._next_step(max_steps)
        if step is None:
            return
        begin_s = self._started(step, now_s) + step.wait_s
        computed_s = self._steps_s(step.batch, step.max_steps) + step.stall_s
        flight = Flight(step, begin_s, step.max_steps, begin_s + computed_s)
        self._flights.append(flight)
        self._timer = self._loop.call_at(flight.end_s, self._ended)

    def _next_step(self, max_steps: int = 1) -> SimStep | None:
        step, scheduler = self.scheduler.schedule(max_steps), self.scheduler
        while step is None and not self._flights and (stuck := scheduler.running[:1]):
            # Requests that came with their KV can together leave no block for any of them: one gives up its own.
            scheduler.remove(stuck)
            for request in stuck:
                request.num_preemptions += 1
                scheduler.add(request)
            step = scheduler.schedule(max_steps)
        return step

    def _must_wait(self, now_s: float) -> bool:
        """Whether a stall is not over; comes back when it is."""
        if now_s >= self._ready_s:
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._ready_s, self._fill, self._ready_s)
        return True

    def _started(self, step: SimStep, now_s: float) -> float:
        """Writes down who begins; when computing begins."""
        for request in step.admitted:
            if request.scheduled_s is None:
                request.scheduled_s = now_s
        if self._swap_s is None or not (step.swap_out_bytes or step.swap_in_bytes):
            return now_s
        return now_s + self._swap_s(step.swap_out_bytes, step.swap_in_bytes)

    def _steps_s(self, batch: Batch, num_steps: int) -> float:
        return self.times.decodes_s(batch, num_steps) if num_steps > 1 else self.times.step_s(batch)

    def _ended(self) -> None:
        if self._is_closed:
            return
        flight = self._flights.popleft()
        self._is_at_boundary = True
        ended = self._finish(flight, flight.num_steps, flight.end_s)
        if self._leaving:
            self._let_go()
        if ended:
            self._on_end(ended)
        self._is_at_boundary = False
        if self._pausing and not self._flights:
            for waiter in self._pausing:
                if not waiter.done():
                    waiter.set_result(None)
            self._pausing = []
        self._fill(flight.end_s)

    def _let_go(self) -> None:
        bound = {request for flight in self._flights for request in flight.step.requests}
        gone = [request for request in self._leaving if request not in bound]
        self._leaving = [request for request in self._leaving if request in bound]
        self.scheduler.remove(gone)

    def _cut(self, max_steps: int = 1) -> None:
        """Finishes steps that have ended, where several were begun at once; at most `max_steps` go on from there."""
        flight = self._flights[0] if self._flights else None
        if flight is None or flight.num_steps == 1:
            return
        passed_s = self._loop.time() - flight.begin_s
        done = self.times.steps_within(flight.step.batch, passed_s) if passed_s > 0 else 0
        done = min(done, flight.num_steps - 1)
        if done == 0 and max_steps >= flight.num_steps:
            return
        assert self._timer is not None
        self._timer.cancel()
        if done == 0:  # its first step is under way
            flight.num_steps = max_steps
            flight.end_s = flight.begin_s + self._steps_s(flight.step.batch, max_steps)
            self._timer = self._loop.call_at(flight.end_s, self._ended)
            return
        self._flights.popleft()
        boundary_s = flight.begin_s + self._steps_s(flight.step.batch, done)
        self._finish(flight, done, boundary_s)
        self._fill(boundary_s, max_steps)

    # Tokens ----------------------------------------------------------------------------------------------------------

    def _finish(self, flight: Flight, num_steps: int, end_s: float) -> list[LiveRequest]:
        """Gives out the tokens of `num_steps` steps; requests that have all of theirs."""
        step, batch = flight.step, flight.step.batch
        ended = self.scheduler.finish(step, num_steps)
        if self._on_step is not None:
            self._on_step()
        first_s, last_step_s = end_s, end_s - flight.begin_s
        self.busy_s += last_step_s
        self._count_work(batch, last_step_s, num_steps)
        if num_steps > 1:
            first_s = flight.begin_s + self.times.step_s(batch)
            last_step_s = self._nth_step_s(batch, num_steps - 1)
            self.gaps.add_rising(lambda n: self._nth_step_s(batch, n), 1, num_steps, len(step.due))
        self.last_step_s = last_step_s
        for request in step.due:
            if request.arrival.tbt_s is not None:
                request.note_token(first_s, request.last_token_s)
                if num_steps > 1:
                    request.note_token(end_s, first_s, num_steps - 1)
        self._write(step.due, first_s, end_s, last_step_s if num_steps > 1 else 0.0)
        return ended

    def _count_work(self, batch: Batch, seconds: float, num_steps: int) -> None:
        """Notes what `num_steps` steps, the first of which is `batch`, computed in `seconds`."""
        count_work(self.work, batch, seconds, num_steps)

    def _nth_step_s(self, batch: Batch, index: int) -> float:
        return self.times.step_s(Batch(batch.num_decodes, batch.context_tokens + index * batch.num_decodes))

    def _write(self, due: Sequence[LiveRequest], first_s: float, last_s: float, inner_gap_s: float) -> None:
        """Times of tokens: the first of these steps ended at `first_s`, the last at `last_s`."""
        before_s, gap_s, count = -1.0, 0.0, 0  # of the last request; most have the same
        for request in due:
            token_s = request.last_token_s
            request.last_token_s = last_s
            if token_s is None:
                if request.first_token_s is None:
                    request.first_token_s = first_s
                longest_s = inner_gap_s
            else:
                if token_s != before_s:
                    self.gaps.add(gap_s, count)
                    before_s, gap_s, count = token_s, first_s - token_s, 0
                count += 1
                longest_s = gap_s if gap_s > inner_gap_s else inner_gap_s
            if longest_s > request.longest_gap_s:
                request.longest_gap_s = longest_s
        self.gaps.add(gap_s, count)


def count_work(work: StepTotals, batch: Batch, seconds: float, num_steps: int = 1) -> None:
    """Adds `num_steps` steps to `work`, the first of which is `batch`; in the others each decode has a token more."""
    decodes, context = batch.num_decodes, num_steps * batch.context_tokens
    context += batch.num_decodes * (num_steps * (num_steps - 1) // 2)
    tokens, pairs = decodes, 0
    for chunk in batch.prefills:
        tokens += chunk.num_tokens
        context += num_steps * (chunk.num_tokens + chunk.prefix_tokens)
        pairs += chunk.num_tokens * (chunk.num_tokens + 2 * chunk.prefix_tokens)
    work.add(seconds, tokens, decodes + len(batch.prefills), context, pairs, num_steps)
