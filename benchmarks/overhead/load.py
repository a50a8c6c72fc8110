"""Closed-loop load: N clients, each sends its next request as soon as the last one ended."""

import asyncio
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.client import Request
from benchmarks.figures import complete, gaps_s, mean, percentile, tpots_s, ttfts_s
from benchmarks.overhead.plan import SERVED_NAME, Level, Plan
from benchmarks.sse import Answer, Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one level of load measured on one system."""

    num_clients: int
    completed: int
    failed: int
    wall_s: float
    tokens_per_s: float  # output tokens
    ttft_p50_s: float  # from sending the request to the first event with text
    ttft_p99_s: float
    itl_p50_s: float  # between two events of an answer, as the socket delivered them
    itl_p99_s: float
    tpot_p50_s: float  # (last event - first) / (output tokens - 1), per request
    prompt_tokens_mean: float
    machine_cpu_s: float  # of all processes together, client included
    client_cpu_s: float
    first_error: str = ""


async def run_level(plan: Plan, urls: Sequence[str], prompts: Sequence[str], num_clients: int) -> Figures:
    """Sends all `prompts`; client i talks to `urls[i % len(urls)]`. Bounded by the plan's time-out."""
    give_up_s = time.perf_counter() + plan.level_timeout_s
    queue = iter(prompts)
    answers: list[Answer] = []

    async def client(index: int) -> None:
        connection = Connection(urls[index % len(urls)])
        try:
            for prompt in queue:  # one shared iterator: each prompt is sent once
                left_s = give_up_s - time.perf_counter()
                if left_s <= 0:
                    return
                request = Request(prompt=prompt, max_tokens=plan.output_tokens)
                answers.append(await connection.chat(request.body(SERVED_NAME), left_s))
        finally:
            connection.close()

    machine_s, client_s, start_s = _machine_cpu_s(), _own_cpu_s(), time.perf_counter()
    await asyncio.gather(*(client(index) for index in range(num_clients)))
    wall_s = time.perf_counter() - start_s
    return _figures(
        answers,
        num_clients=num_clients,
        unsent=len(prompts) - len(answers),
        wall_s=wall_s,
        machine_cpu_s=_machine_cpu_s() - machine_s,
        client_cpu_s=_own_cpu_s() - client_s,
    )


def measure(plan: Plan, urls: Sequence[str], round_index: int) -> list[Figures]:
    """Warms the system up, then runs all levels one after another."""

    async def levels() -> list[Figures]:
        warm = Level(num_clients=8, num_requests=24)
        await run_level(plan, urls, plan.prompts(-1, warm), warm.num_clients)
        return [
            await run_level(plan, urls, plan.prompts(round_index, level), level.num_clients) for level in plan.levels
        ]

    try:
        import uvloop
    except ImportError:
        return asyncio.run(levels())
    return uvloop.run(levels())


def _figures(
    answers: Sequence[Answer],
    *,
    num_clients: int,
    unsent: int,
    wall_s: float,
    machine_cpu_s: float,
    client_cpu_s: float,
) -> Figures:
    good = complete(answers)
    bad = [answer for answer in answers if answer.error]
    ttft_s, tpot_s = ttfts_s(answers), tpots_s(answers)
    between_s = gaps_s(answers)
    return Figures(
        num_clients=num_clients,
        completed=len(good),
        failed=len(bad) + unsent,
        wall_s=wall_s,
        tokens_per_s=sum(answer.output_tokens for answer in good) / wall_s,
        ttft_p50_s=percentile(ttft_s, 50),
        ttft_p99_s=percentile(ttft_s, 99),
        itl_p50_s=percentile(between_s, 50),
        itl_p99_s=percentile(between_s, 99),
        tpot_p50_s=percentile(tpot_s, 50),
        prompt_tokens_mean=mean([answer.prompt_tokens for answer in good]) if good else 0.0,
        machine_cpu_s=machine_cpu_s,
        client_cpu_s=client_cpu_s,
        first_error=bad[0].error if bad else ("not sent in time" if unsent else ""),
    )


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _machine_cpu_s() -> float:
    """CPU time that all processes of this machine have used; 0 where /proc is missing."""
    try:
        with open("/proc/stat", encoding="ascii") as stat:
            user, nice, system = (int(ticks) for ticks in stat.readline().split()[1:4])
    except OSError:
        return 0.0
    return (user + nice + system) / 100  # USER_HZ
