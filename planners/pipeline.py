"""A pipeline in virtual time: how long its stages stand idle between microbatches that take different times.

A microbatch enters a stage when it has left the stage before and the stage has no other. Every stage takes its share of
what the microbatch costs on the whole model. The prompt's next chunk may follow at once; a decode enters only when the
token before it has come back from the last stage.

Idle time of a stage counts from its first microbatch to its last one: filling and emptying the pipeline, which no order
of work avoids, is left out.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pengserve.planners.cost_model import CostModel
from pengserve.planners.lookahead import Microbatch, Work
from pengserve.planners.types.errors import PlanError

Former = Callable[[Sequence[Work], Sequence[float]], Mapping[str, int]]
"""Ready work, and costs of the microbatches in flight -> new tokens by request: `next_budget` with the rest bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """How well a pipeline was filled."""

    share: float  # of the stages' time that they stood idle
    makespan_s: float  # from the first microbatch's start to the last one's end
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request to serve: its prompt is computed, then one token after another."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0


def simulate(batches: Iterable[Microbatch], stages: int, model: CostModel) -> Bubble:
    """Runs microbatches through a pipeline in their order."""
    pipeline = _Stages(stages)
    back_s: dict[str, float] = {}
    for batch in batches:
        ready_s = max((back_s.get(work.request_id, 0.0) for work in batch.work if not work.is_prefill), default=0.0)
        end_s = pipeline.enter(ready_s, model.batch_s(work.chunk for work in batch.work))
        back_s.update((work.request_id, end_s) for work in batch.work)
    return pipeline.bubble()


def serve(
    jobs: Sequence[Job], former: Former, stages: int, model: CostModel, max_running: int = 1 << 30
) -> tuple[Bubble, Bubble]:
    """Serves `jobs`, at most `max_running` of them at a time, with at most `stages` microbatches in flight, each formed
    as soon as there is room for it.

    Returns the bubble of the time in which prompts wait (lookahead is for queues; when few requests are left, stages
    must stand idle), and that of the whole run.

    Raises:
        PlanError: `former` chose nothing though nothing was in flight.
    """
    pipeline, now_s = _Stages(stages), 0.0
    queued = pipeline.bubble()
    requests = _Requests(jobs, max_running)
    flight: deque[tuple[float, Microbatch]] = deque()
    while requests.coming or requests.ready or flight:
        requests.arrive(now_s)
        has_room = len(flight) < stages
        if has_room and requests.ready:
            taken = requests.take(former(tuple(requests.ready.values()), [batch.cost_s for _, batch in flight]))
            if taken:
                batch = Microbatch(work=taken, cost_s=model.batch_s(work.chunk for work in taken))
                flight.append((pipeline.enter(now_s, batch.cost_s), batch))
                queued = pipeline.bubble() if requests.is_queue() else queued
                continue
        next_s = requests.coming[0].arrival_s if has_room and requests.coming and requests.has_room() else None
        if flight and (next_s is None or flight[0][0] <= next_s):
            now_s, batch = flight.popleft()
            requests.come_back(batch.work, now_s)
        elif next_s is not None:
            now_s = next_s
        else:
            raise PlanError("no work was chosen for an empty pipeline: the function that forms microbatches is broken")
    return queued, pipeline.bubble()


class _Stages:
    """Stages that take microbatches in order."""

    def __init__(self, num_stages: int) -> None:
        self._free_s = [0.0] * num_stages
        self._first_s: list[float] = []
        self._busy_s = 0.0
        self._count = 0

    def enter(self, ready_s: float, cost_s: float) -> float:
        """Sends a microbatch through; when it comes back."""
        now_s, stage_s = ready_s, cost_s / len(self._free_s)
        starts = []
        for stage, free_s in enumerate(self._free_s):
            starts.append(max(now_s, free_s))
            now_s = self._free_s[stage] = starts[-1] + stage_s
        self._first_s = self._first_s or starts
        self._busy_s += cost_s
        self._count += 1
        return now_s

    def bubble(self) -> Bubble:
        """What has become of all that entered."""
        if not self._count:
            return Bubble(share=0.0, makespan_s=0.0, num_microbatches=0)
        open_s = sum(self._free_s) - sum(self._first_s)
        return Bubble(
            share=max(0.0, 1.0 - self._busy_s / open_s),
            makespan_s=self._free_s[-1] - self._first_s[0],
            num_microbatches=self._count,
        )


class _Requests:
    """Requests on their way to their last token."""

    def __init__(self, jobs: Sequence[Job], max_running: int) -> None:
        self.coming = deque(sorted(jobs, key=lambda job: job.arrival_s))
        self.ready: dict[str, Work] = {}
        self._room = max_running
        self._jobs = {job.request_id: job for job in jobs}

    def arrive(self, now_s: float) -> None:
        """Prompts that have arrived by now are ready, as far as there is room."""
        while self.coming and self._room and self.coming[0].arrival_s <= now_s:
            job = self.coming.popleft()
            self._room -= 1
            self.ready[job.request_id] = Work(
                request_id=job.request_id,
                prefix_tokens=0,
                num_tokens=job.prompt_tokens,
                is_prefill=True,
                since=job.arrival_s,
            )

    def has_room(self) -> bool:
        """Whether one more request may run."""
        return self._room > 0

    def is_queue(self) -> bool:
        """Whether prompts wait."""
        return bool(self.coming) or any(work.is_prefill for work in self.ready.values())

    def take(self, budget: Mapping[str, int]) -> tuple[Work, ...]:
        """What of the ready work enters the pipeline; the rest of a prompt stays ready."""
        taken = []
        for request_id, num_tokens in budget.items():
            work = self.ready.pop(request_id)
            taken.append(replace(work, num_tokens=num_tokens))
            if num_tokens < work.num_tokens:
                prefix, rest = work.prefix_tokens + num_tokens, work.num_tokens - num_tokens
                self.ready[request_id] = replace(work, prefix_tokens=prefix, num_tokens=rest)
        return tuple(taken)

    def come_back(self, done: Iterable[Work], now_s: float) -> None:
        """Tokens have left the last stage: those requests that are not at their end decode on."""
        for work in done:
            job, computed = self._jobs[work.request_id], work.prefix_tokens + work.num_tokens
            if computed == job.prompt_tokens + job.output_tokens - 1:
                self._room += 1
            elif computed >= job.prompt_tokens:
                self.ready[work.request_id] = Work(
                    request_id=work.request_id, prefix_tokens=computed, num_tokens=1, is_prefill=False, since=now_s
                )
