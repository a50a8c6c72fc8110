"""What further lanes cost an instance: `python -m tests.support.lane_costs MODEL ENGINE_JSON` prints one JSON line."""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.layout import Group
from pengserve.replicas.engine.groups.tp_lane import TpLane
from pengserve.replicas.engine.instance_lanes import Lanes
from tests.support.vllm_requests import sent_request

GROUPS = ("tp2@(0,1)", "tp4@(0,1,2,3)")


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def steps(lanes: Lanes, tag: str, count: int) -> float:
    """Median seconds of a step that decodes four requests."""
    for i in range(4):
        request = sent_request(
            f"{tag}{i}", [7 + i] * 20, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        )
        lanes.prepare(request, [], lanes.add)
    took = []
    while lanes.has_work():
        started_s = time.perf_counter()
        lanes.step()
        lanes.stats()
        took.append(time.perf_counter() - started_s)
    return statistics.median(took)


def touched_by_steps(lanes: Lanes) -> int:
    """How often steps of the `dp` lane look at any attribute of a lane that does not run."""
    count = 0

    def look(lane: TpLane, name: str) -> Any:
        nonlocal count
        count += 1
        return object.__getattribute__(lane, name)

    TpLane.__getattribute__ = look  # type: ignore[method-assign]
    try:
        steps(lanes, "spied", 20)
    finally:
        del TpLane.__getattribute__
    return count


def main() -> None:
    """Measures a `dp` lane alone, builds the others, measures again."""
    config = InstanceConfig(app="tests", model=sys.argv[1], degrees=(2, 4), engine=json.loads(sys.argv[2]))
    lanes = Lanes(config)
    steps(lanes, "warm", 30)
    base_s = min(steps(lanes, f"a{i}", 100) for i in range(3))
    before = rss_bytes()
    started_s = time.perf_counter()
    for group in map(Group.parse, GROUPS):
        lanes.registry.build(group, 0)
    built_s = time.perf_counter() - started_s
    added = rss_bytes() - before
    idle_s = min(steps(lanes, f"b{i}", 100) for i in range(3))
    result = {
        "rss_bytes": before,
        "added_bytes": added,
        "built_s": built_s,
        "base_s": base_s,
        "idle_s": idle_s,
        "touched": touched_by_steps(lanes),
        "shapes": [info.shape for info in lanes.registry.infos() if info.capacity],
        "broken_laws": lanes.check(),
    }
    sys.stdout.write("RESULT" + json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would only slow the end


if __name__ == "__main__":
    main()
