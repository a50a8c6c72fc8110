"""Laws of an instance's lanes: further shapes cost next to nothing, and nothing at all while they do not run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pengserve.planners.types.config import InstanceConfig
from pengserve.replicas.environment import process_environment
from tests.support.processes import ENGINE, OFFLINE

pytestmark = [pytest.mark.slow, pytest.mark.shapes]


def test_unused_lanes_cost_nothing(model: Path) -> None:
    own = process_environment(InstanceConfig(app="tests", model=str(model)))
    environment = {**os.environ, **OFFLINE, **own}
    command = [sys.executable, "-m", "tests.support.lane_costs", str(model), json.dumps(ENGINE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    found = json.loads(line.removeprefix("RESULT"))
    added, rss = found["added_bytes"], found["rss_bytes"]
    print(f"\n  two lanes add {added / 1e6:.1f} MB to {rss / 1e6:.0f} MB in {found['built_s']:.2f} s")
    print(f"  a step takes {found['base_s'] * 1e3:.2f} ms, with unused lanes {found['idle_s'] * 1e3:.2f} ms")
    assert found["shapes"] == ["dp", "tp2", "tp4"]
    assert found["broken_laws"] == []
    assert added < 0.02 * rss
    assert found["touched"] == 0, "a step looked at a lane that does not run"
