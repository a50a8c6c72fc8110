"""What an instance's process starts with, seen in one."""

import os
import subprocess
import sys

from pengserve.planners.types.config import InstanceConfig
from pengserve.replicas.environment import process_environment

# Three activations a step, freed after it. Prints the page faults of twenty steps.
STEPS = """
import resource
import numpy as np

def step():
    kept = [np.empty(12 << 20, dtype=np.uint8) for _ in range(3)]
    for array in kept:
        array.fill(1)

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(environment: dict[str, str]) -> int:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    run = subprocess.run(
        [sys.executable, "-c", STEPS], env=plain | environment, capture_output=True, text=True, timeout=60, check=True
    )
    return int(run.stdout)


def test_what_a_step_frees_the_next_one_has_at_once() -> None:
    config = InstanceConfig(app="tests", model="unused")
    assert page_faults(process_environment(config)) < page_faults({}) / 10


def test_a_gpu_instance_leaves_cores_and_the_c_library_alone() -> None:
    names = process_environment(InstanceConfig(app="tests", model="unused", device="cuda"))
    assert not [name for name in names if name.startswith(("MALLOC_", "OMP_", "VLLM_CPU_"))]
