"""What a load is made from: two levels on static dp, then rehearsals of its burst on the system that it is to overload.

Levels also say how long answers must be for requests to live as long as the plan says: what memory runs out for, and
how soon it is free again, is then the same on a slow machine and on a quick one.

A rehearsal sends the lead and one burst to vLLM's data parallelism, a burst that memory holds: beyond it requests wait,
and demand says more of the waiting than of the load. What it comes to is a share of what the levels predict, and with
the mean of this round's newest shares the next course is made. Machines drift, so each round has rehearsals of its own.
"""

import time
from dataclasses import dataclass, replace

from benchmarks.figures import complete, mean
from benchmarks.overload import timeline
from benchmarks.overload.load import (
    Calibration,
    Course,
    Level,
    Plan,
    make_course,
    predicted_peak,
    with_tokens,
)
from benchmarks.overload.profiles import Profile
from benchmarks.overload.systems import PengServe, System
from benchmarks.sse import Answer
from pengserve.planners.types.snapshot import KvCapacity

LENGTHS = 2  # tries to make answers as long as wanted: longer ones leave room for fewer, which live less long
LIKE = 2  # rehearsals, the newest, that are like what is to come: the first of a round is of a guess, and smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """One burst, as it came."""

    burst_requests: int
    demand_peak: float  # share of what dp holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What was found out about a number of instances before the runs."""

    num_instances: int
    weight_bytes: int  # of an instance
    calibration: Calibration
    course: Course  # of the newest round
    rehearsals: tuple[Rehearsal, ...] = ()  # of all rounds
    profiles: tuple[Profile, ...] = ()  # how long steps take, where all instances make them

    def tokens_per_word(self, plan: Plan) -> float:
        """Of prompts."""
        return self.calibration.prompt_tokens / ((plan.min_words + plan.max_words) / 2)


def calibrate(plan: Plan, num_instances: int, system: PengServe) -> tuple[Plan, Size]:
    """Measures both levels on static dp and makes the course; the plan with answers of the length that was found."""
    alone, wide = lanes_in_dp(plan, system)
    dp_tokens = alone.num_tokens * num_instances
    probe = system.client.send(plan.calibration(num_instances, "probe")).result()
    prompt_tokens = mean([answer.prompt_tokens for answer in complete(probe)])
    full = _full_level(plan, system, dp_tokens, prompt_tokens)
    for _ in range(LENGTHS):
        plan = plan.scaled(plan.life_s / full.life_s, prompt_tokens)
        full = _full_level(plan, system, dp_tokens, prompt_tokens)
    found = Calibration(
        prompt_tokens=prompt_tokens,
        dp_tokens=dp_tokens,
        pp_tokens=wide.num_tokens * (num_instances // plan.stages),
        few=level(plan, system, max(1, int(plan.low_share * full.in_flight))),
        full=full,
    )
    size = Size(
        num_instances=num_instances,
        weight_bytes=alone.weight_bytes,
        calibration=found,
        course=make_course(plan, found),
    )
    return plan, size


def lanes_in_dp(plan: Plan, system: PengServe) -> tuple[KvCapacity, KvCapacity]:
    """Lays `system` out as dp; what an instance holds alone, and in a pipeline. RuntimeError where it can form none."""
    system.cluster.set_layout("dp")
    lanes = {lane.shape: lane.capacity for lane in system.cluster.snapshot().instances[0].lanes}
    alone, wide = lanes["dp"], lanes[f"pp{plan.stages}"]
    if alone is None or wide is None:
        raise RuntimeError("this model cannot run in pipelines of so many stages")
    return alone, wide


def _full_level(plan: Plan, system: PengServe, dp_tokens: int, prompt_tokens: float) -> Level:
    """So many in flight that nobody is preempted, though all are as old."""
    in_flight = int(dp_tokens / (prompt_tokens + plan.mean_output + int(plan.engine["block_size"])))
    return level(plan, system, max(2, in_flight))


def level(plan: Plan, system: PengServe, in_flight: int) -> Level:
    """So many in flight for about `calibrate_s`. Ramps at both ends do not count."""
    name = f"{in_flight}/{plan.output_tokens}"  # other words at each level, lest prompts be cached
    first = plan.calibration(in_flight, f"{name}/first")
    start_s = time.perf_counter()
    all_answered(system.client.send(first, clients=in_flight).result())
    rounds = max(2.0, plan.calibrate_s / (time.perf_counter() - start_s))
    requests = plan.calibration(int((rounds + 1) * in_flight), name)
    answers = all_answered(system.client.send(requests, clients=in_flight).result())
    ends_s = sorted(answer.event_times_s[-1] for answer in answers)
    # Until the last is sent, so many are in flight; the first of them end together.
    stop_s = max(answer.sent_s for answer in answers)
    begin_s = min(answer.sent_s for answer in answers)
    return Level(in_flight=in_flight, requests_per_s=sum(end <= stop_s for end in ends_s) / (stop_s - begin_s))


def rehearse(plan: Plan, size: Size, system: System) -> Size:
    """Sends a burst to `system` as often as the plan says; the size with what was learned from each."""
    found = size.calibration
    levels, shares = replace(found, came=1.0), []
    that_fits = replace(plan, peak_share=plan.rehearsal_share)
    for _ in range(plan.rehearsals):
        course = replace(make_course(that_fits, found), num_bursts=1, calm_s=found.full.life_s)
        pairs = plan.requests(size.num_instances, course, "rehearsal", -1 - len(size.rehearsals))
        served = system.serve("vllm-dp", with_tokens(pairs, size.tokens_per_word(plan)))
        answers = all_answered(served.answers)
        end_s = max(answer.event_times_s[-1] for answer in answers)
        peak = max(timeline.demand(answers, served.start_s, end_s, int(plan.engine["block_size"])))
        shares.append(peak / predicted_peak(plan, levels, course))
        found = replace(levels, came=mean(shares[-LIKE:]))
        rehearsal = Rehearsal(burst_requests=course.burst_requests, demand_peak=peak / found.dp_tokens)
        size = replace(
            size,
            calibration=found,
            course=make_course(plan, found),
            rehearsals=(*size.rehearsals, rehearsal),
        )
    return size


def all_answered(answers: list[Answer]) -> list[Answer]:
    """The same.

    Raises:
        RuntimeError: one was not answered whole, and why.
    """
    failed = next((answer.error for answer in answers if answer.error), "")
    if failed:
        raise RuntimeError(f"a request of the calibration was not answered: {failed}")
    return answers
