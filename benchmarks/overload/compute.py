"""A burst that compute is too short for, and memory is not: `--bound compute`.

Prompts are long and answers a few tokens, so what runs needs little KV. Requests queue all the same, and all that wait
would need more KV than there is. A rule that looks at demand alone drops parameters, and the pipelines then read the
queue no sooner. Nothing may be lost against vLLM.

    low rate    `low_share` of the requests that static dp answers in a second
    burst       `peak_share` times as many as dp answers, for `BURST_S`
    calm        as long as dp needs for what the burst has left over, and a little more
"""

from dataclasses import replace

from benchmarks.figures import complete, mean
from benchmarks.overload.calibrate import Size, lanes_in_dp, level
from benchmarks.overload.load import Calibration, Course, Level, Plan
from benchmarks.overload.systems import PengServe

PEAK_RATE = 2.0  # requests of a burst, over what dp answers
IN_FLIGHT = 8  # requests of an instance, at which it answers as many in a second as it can
BURST_S, LEAD_S, REST_S = 5.0, 5.0, 10.0  # the last: of calm, when the queue has gone


def bound_by_compute(plan: Plan) -> Plan:
    """The same for prompts of half a step, and answers of a few tokens."""
    return replace(
        plan,
        is_compute_bound=True,
        min_words=90,
        max_words=120,
        output_tokens=(2, 4),
        rehearsals=0,
        has_profiles=False,
    )


def calibrate_compute(plan: Plan, num_instances: int, system: PengServe) -> tuple[Plan, Size]:
    """Measures how many requests static dp answers in a second, and makes the course; the plan as it is."""
    alone, wide = lanes_in_dp(plan, system)
    probe = system.client.send(plan.calibration(num_instances, "probe")).result()
    full = level(plan, system, IN_FLIGHT * num_instances)
    found = Calibration(
        prompt_tokens=mean([answer.prompt_tokens for answer in complete(probe)]),
        dp_tokens=alone.num_tokens * num_instances,
        pp_tokens=wide.num_tokens * (num_instances // plan.stages),
        few=full,
        full=full,
    )
    course = compute_course(plan, full)
    return plan, Size(num_instances=num_instances, weight_bytes=alone.weight_bytes, calibration=found, course=course)


def compute_course(plan: Plan, full: Level) -> Course:
    """The course of a burst beyond what `full` answers."""
    per_s = full.requests_per_s
    left = (plan.peak_share - 1.0) * BURST_S  # seconds of dp's work
    return Course(
        low_per_s=plan.low_share * per_s,
        burst_requests=round((plan.peak_share - plan.low_share) * per_s * BURST_S),
        lead_s=LEAD_S,
        burst_s=BURST_S,
        calm_s=left / (1.0 - plan.low_share) + REST_S,
        num_bursts=plan.num_bursts,
    )
