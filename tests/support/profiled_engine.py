"""An engine that is profiled: `python -m tests.support.profiled_engine MODEL ENGINE_JSON` prints one JSON line."""

import json
import os
import sys
from itertools import count
from typing import Any

from vllm import SamplingParams

from pengserve.planners.cost_model import Chunk
from pengserve.planners.step_fit import step_costs
from pengserve.planners.types.codec import to_data
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import EngineError
from pengserve.replicas.engine.idle_profile import NUM_STEPS, IdleProfile
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from pengserve.replicas.engine.lanes.lane_totals import LaneTotals
from pengserve.replicas.engine.profiling import choose_batches, profile
from tests.support.vllm_requests import sent_request


def generate(lane: DpLane, tag: str) -> list[list[int]]:
    """Greedy answers to three prompts."""
    answers: dict[str, list[int]] = {}
    for index in range(3):
        request = sent_request(
            f"{tag}{index}",
            [10 + index] * (40 + 30 * index),
            SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
        )
        lane.prepare(request, [], lane.add)
        answers[request.request_id] = []
    while lane.has_work():
        for outputs in lane.step().values():
            for output in outputs.outputs:
                answers[output.request_id] += output.new_token_ids
    return list(answers.values())


def refusal(lane: DpLane, *chunks: Chunk) -> str:
    """What profiling a batch that cannot be says."""
    try:
        list(profile(lane, [chunks], 1))
    except EngineError as error:
        return str(error)
    return ""


def use_idle_time(lane: DpLane) -> dict[str, Any]:
    """Profiles in idle time, called away after every second step; the answers in between, and what changed."""
    totals, free = lane.kept_totals(), lane.num_free()
    untimely = IdleProfile(lane)
    lane.count_on_from(LaneTotals(departures=totals.departures))
    untimely.advance(lambda: False)  # nothing was served, and its patience has just begun
    began_at_once = untimely.spent_s > 0
    lane.count_on_from(totals)
    profile_, num_rounds, answers = IdleProfile(lane), 0, None
    while not profile_.is_over:
        steps = count()
        profile_.advance(lambda steps=steps: next(steps) == NUM_STEPS + 1)  # a batch, and a step of the next
        num_rounds += 1
        changed = lane.kept_totals() != totals or lane.num_free() != free or lane.has_work()
        if num_rounds == 3:
            answers = generate(lane, "c")
            totals = lane.kept_totals()
    return {
        "began_at_once": began_at_once,
        "rounds": num_rounds,
        "changed": changed,
        "answers": answers,
        "model": to_data(profile_.model()),
        "costs": to_data(step_costs(profile_.samples, 2)),
        "samples": to_data(profile_.samples),
    }


def main() -> None:
    """Answers, profiles, is asked for what cannot be, answers again."""
    engine = json.loads(sys.argv[2])
    lane = DpLane(InstanceConfig(app="tests", model=sys.argv[1], engine=engine))
    before, free = generate(lane, "a"), lane.num_free()
    batches = choose_batches(lane.capacity, engine["max_num_batched_tokens"], 9, repetitions=3)
    samples = list(profile(lane, batches, 3))
    held = lane.num_requests()
    wide = [Chunk(prefix_tokens=0, num_tokens=engine["max_num_batched_tokens"])] * 2
    long = Chunk(prefix_tokens=lane.capacity.max_model_len - 8, num_tokens=2)
    refusals = [refusal(lane, *wide), refusal(lane, *[long] * (lane.capacity.num_tokens // long.prefix_tokens + 1))]
    left = lane.num_requests()
    after, free_after = generate(lane, "b"), lane.num_free()
    idle = use_idle_time(lane)
    request_ids = [request.request_id for request in lane.requests()]
    result = {
        "before": before,
        "after": after,
        "free": [free, free_after],
        "held": [held, left, len(request_ids)],
        "batches": to_data(batches),
        "samples": to_data(samples),
        "refusals": refusals,
        "idle": idle,
    }
    sys.stdout.write("RESULT" + json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would only slow the end


if __name__ == "__main__":
    main()
