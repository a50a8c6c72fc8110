"""Idle time of an engine with a host tier: `python -m tests.support.tiered_profile MODEL JSON` prints one JSON line."""

import itertools
import json
import sys

from pengserve.planners.types.config import InstanceConfig
from pengserve.replicas.engine.idle_profile import PATIENCE_S, IdleProfile
from pengserve.replicas.engine.lanes.dp_lane import DpLane


def main() -> None:
    """Profiles a lane that has served nothing yet, so that no block holds anything."""
    given = json.loads(sys.argv[2])
    config = InstanceConfig(app="tests", model=sys.argv[1], engine=given["engine"], host_bytes=given["host_bytes"])
    lane = DpLane(config)
    assert lane.tiers is not None
    times = itertools.count(step=PATIENCE_S + 1.0)
    profile = IdleProfile(lane, now=lambda: next(times))
    profile.advance(lambda: False)
    lane.tiers.settle()
    found = {
        "num_samples": len(profile.samples),
        "longest": max((sum(c.prefix_tokens + c.num_tokens for c in s.chunks) for s in profile.samples), default=0),
        "device_tokens": lane.tiers.pool.num_blocks * lane.capacity.block_size,
        "staged": lane.tiers.counts.staged,
        "broken": lane.tiers.check(),
    }
    print("RESULT" + json.dumps(found), flush=True)
    lane.close()


if __name__ == "__main__":
    main()
