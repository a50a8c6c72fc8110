"""How many prompt tokens are found in prefix caches, by dispatch: `python -m benchmarks.regret.prefixes`.

A window of Mooncake's trace on static dp instances under vLLM's own schedulers and prefix caches: round robin, the
least load, and dispatch by predicted TTFT with one ingress and with several, each of which knows what it sent itself.
The last rows are of an ingress that knows every cache exactly. Prints a table; nothing is written.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.regret.cases import SEED, TRACES, clipped, cluster_of, machines, stretched
from benchmarks.result_files import table
from pengserve.planners.types.ids import InstanceKey
from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.dispatcher import SimDispatcher
from pengserve.simulator.reports.figures import figures_of
from pengserve.simulator.requests import Arrival, LiveRequest
from pengserve.simulator.run import simulate

WAYS = (("round_robin", 1), ("load", 1), ("ttft", 1), ("ttft", 2), ("ttft", 4))
EXACT = "ttft, all caches known"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one way of dispatch came to."""

    way: str
    hit_share: float  # of all prompt tokens
    ttft_p50_s: float
    ttft_p99_s: float
    preemptions: int


class ExactDispatcher(SimDispatcher):
    """Asks the instances' caches themselves, as an ingress could that follows every block of theirs."""

    def hits(self, request: LiveRequest) -> Mapping[InstanceKey, int]:
        """Tokens of the prompt that are in each cache now."""
        schedulers: dict[InstanceKey, Any] = {ready.key: ready.current.scheduler for ready in self.ready()}
        return {key: scheduler.cached_tokens(request) for key, scheduler in schedulers.items()}


def measure(
    cluster: Mapping[str, Any],
    arrivals: Sequence[Arrival],
    dispatch: str,
    num_ingresses: int,
    *,
    is_exact: bool = False,
) -> Found:
    """Serves `arrivals` on static dp instances."""
    config = SimulationConfig.parse(
        {
            "name": f"mooncake-{dispatch}",
            "seed": SEED,
            "cluster": {**cluster, "prefix_caching": True, "block_size": 64, "ingresses": num_ingresses},
            "scheduler": "vllm",
            "policy": {"name": "vllm_dp", "options": {"dispatch": dispatch}},
        }
    )
    kind = ExactDispatcher if is_exact else SimDispatcher
    with mock.patch("pengserve.simulator.ingress.SimDispatcher", kind):
        result = simulate(config, arrivals)
    figures = figures_of(result)
    prompts = sum(outcome.prompt_tokens for outcome in result.outcomes)
    assert figures.ttft_s is not None
    name = f"{dispatch}, {num_ingresses} ingress{'es' * (num_ingresses > 1)}"
    return Found(
        way=EXACT if is_exact else name,
        hit_share=sum(outcome.cached_tokens for outcome in result.outcomes) / prompts,
        ttft_p50_s=figures.ttft_s.p50,
        ttft_p99_s=figures.ttft_s.p99,
        preemptions=figures.num_preemptions,
    )


def main() -> None:
    """Measures all ways, and prints them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regret.prefixes", description=__doc__)
    parser.add_argument("--machine", choices=machines(), default="h200-70b")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the public traces")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the trace, from its start on")
    parser.add_argument("--stretch", type=float, default=1.0, help="so many times as long")
    options = parser.parse_args()
    whole = clipped(options.machine, "mooncake", options.traces)
    arrivals = stretched(whole, options.stretch, options.seconds * options.stretch)
    cluster = {**cluster_of(options.machine), "instances": options.instances}
    found = [measure(cluster, arrivals, dispatch, count) for dispatch, count in WAYS]
    found.append(measure(cluster, arrivals, "ttft", 1, is_exact=True))
    rows = [
        [one.way, f"{one.hit_share:.1%}", f"{one.ttft_p50_s:.2f} s", f"{one.ttft_p99_s:.2f} s", f"{one.preemptions}"]
        for one in found
    ]
    print("\n".join(table(("dispatch", "prompt tokens found", "TTFT P50", "P99", "preempted"), rows)))


if __name__ == "__main__":
    main()
