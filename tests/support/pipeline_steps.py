"""What an unused host tier costs a pipeline: `python -m tests.support.pipeline_steps [ROUNDS]` prints one JSON line.

Two pipelines of two instances, one with a host tier, decode the same load in turn: the gaps between tokens are compared
round by round, each round with what was measured just before or after it.
"""

import contextlib
import itertools
import json
import statistics
import sys

from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.models import tiny_model
from tests.support.streams import make_prompts
from tests.support.traffic import Traffic

REQUESTS, OUTPUT_TOKENS, MEMORY_BYTES, HOST_BYTES = 8, 120, 8 << 20, 16 << 20
HOST_MODULE = "pengserve.replicas.host"  # of both, without what tests add to an instance with a host tier


def gap_s(traffic: Traffic, seed: int) -> float:
    """The median gap between two tokens of a stream, once all of them decode."""
    prompts = make_prompts(REQUESTS, seed=seed, longest=60)
    streams = [future.result(120) for future in [traffic.start(prompt, OUTPUT_TOKENS) for prompt in prompts]]
    times = [stream.times_s[OUTPUT_TOKENS // 4 :] for stream in streams]
    return statistics.median(b - a for found in times for a, b in itertools.pairwise(found))


def main(num_rounds: int) -> None:
    """Prints both medians, and the median of the rounds' ratios."""
    with contextlib.ExitStack() as stack:
        traffics: list[Traffic] = []
        for host_bytes in (0, HOST_BYTES):
            cluster: ElasticCluster = stack.enter_context(
                elastic_cluster(
                    tiny_model(),
                    2,
                    degrees=(),
                    max_stages=2,
                    memory_bytes=MEMORY_BYTES,
                    host_bytes=host_bytes,
                    host_module=HOST_MODULE,
                )
            )
            cluster.set_layout("pp2")
            traffics.append(stack.enter_context(Traffic(stack.enter_context(cluster.ingress()))))
            gap_s(traffics[-1], 0)
        rounds: list[tuple[float, float]] = []
        for index in range(num_rounds):
            first = index % 2
            found = {which: gap_s(traffics[which], 1 + index) for which in (first, 1 - first)}
            rounds.append((found[0], found[1]))
    off_s, on_s = (statistics.median(values) for values in zip(*rounds, strict=True))
    ratio = statistics.median(on / off for off, on in rounds)
    print("RESULT" + json.dumps({"off_s": off_s, "on_s": on_s, "ratio": ratio, "rounds": num_rounds}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
