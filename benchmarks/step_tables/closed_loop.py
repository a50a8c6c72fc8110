"""A closed loop in the plainest form: `concurrency` clients, equal requests, one engine that prefills in chunks.

What a load generator measures, from step times alone: the scheduler here is a dozen lines, without KV limits.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from pengserve.planners.cost_model import Chunk
from pengserve.simulator.timing.steps import Batch, StepTimes


class Answer(NamedTuple):
    """Means over all requests."""

    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class _Request:
    arrived_s: float
    computed: int = 0
    generated: int = 0
    first_s: float = 0.0


def closed_loop(
    times: StepTimes, *, concurrency: int, prompt: int, output: int, budget: int, rounds: int = 10
) -> Answer:
    """`rounds` requests of each client, one after the other; all begin at once, as load generators do."""
    waiting = deque(_Request(0.0) for _ in range(concurrency))
    running: list[_Request] = []
    left, now_s = concurrency * (rounds - 1), 0.0
    ttft_s = tpot_s = 0.0
    while waiting or running:
        context = sum(prompt + request.generated for request in running)
        chunks, done = _prefill(waiting, prompt, budget - len(running))
        now_s += times.step_s(Batch(len(running), context, chunks))
        ended = []
        for request in running:
            request.generated += 1
            if request.generated == output:
                ended.append(request)
                tpot_s += (now_s - request.first_s) / (output - 1)
        running = [request for request in running if request.generated < output]
        for request in done:
            request.generated, request.first_s = 1, now_s
            ttft_s += now_s - request.arrived_s
        running += done
        new = min(left, len(ended))
        left -= new
        waiting.extend(_Request(now_s) for _ in range(new))
    return Answer(ttft_s / (concurrency * rounds), tpot_s / (concurrency * rounds))


def _prefill(waiting: deque[_Request], prompt: int, budget: int) -> tuple[tuple[Chunk, ...], list[_Request]]:
    """Chunks of those that wait, the first first; and those whose prompt they end."""
    chunks: list[Chunk] = []
    done: list[_Request] = []
    while waiting and budget > 0:
        num = min(budget, prompt - waiting[0].computed)
        chunks.append(Chunk(prefix_tokens=waiting[0].computed, num_tokens=num))
        waiting[0].computed += num
        budget -= num
        if waiting[0].computed == prompt:
            done.append(waiting.popleft())
    return tuple(chunks), done
