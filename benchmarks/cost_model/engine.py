"""`python -m benchmarks.cost_model.engine INSTANCE_JSON PLAN_JSON`: times steps, one JSON line a sample."""

import json
import os
import random
import sys

from pengserve.planners.types.codec import from_data, to_data
from pengserve.planners.types.config import InstanceConfig
from pengserve.replicas.engine.dp_lane import DpLane
from pengserve.replicas.engine.profiling import choose_batches, profile


def main() -> None:
    """Starts the engine, runs every batch once, then times them all in each round, in another order every time."""
    config, plan = from_data(InstanceConfig, json.loads(sys.argv[1])), json.loads(sys.argv[2])
    lane = DpLane(config)
    batches = choose_batches(
        lane.capacity, config.engine["max_num_batched_tokens"], plan["num_batches"], plan["seed"], plan["repetitions"]
    )
    for _ in profile(lane, batches, 1):
        pass  # first touch of buffers and of sizes
    order = list(range(len(batches)))
    for round_index in range(plan["rounds"]):
        random.Random(round_index).shuffle(order)
        samples = profile(lane, [batches[index] for index in order], plan["repetitions"])
        for index, sample in zip(order, samples, strict=True):
            sys.stdout.write(f"SAMPLE{json.dumps({'batch': index, 'sample': to_data(sample)})}\n")
            sys.stdout.flush()
    os._exit(0)  # vLLM's threads would only slow the end


if __name__ == "__main__":
    main()
