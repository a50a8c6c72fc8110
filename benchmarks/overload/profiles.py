"""How long steps take where all instances are busy at once: what a simulation of the runs starts from.

As many engines as there are instances time the same batches, each in a process of its own, on the cores they share.
"""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.cost_model.measure import MARK, OFFLINE
from benchmarks.overload.load import Plan
from pengserve.planners.cost_model import CostModel, Sample, fit, relative_errors
from pengserve.planners.types.codec import from_data, to_data
from pengserve.planners.types.config import InstanceConfig
from pengserve.replicas.environment import process_environment

BATCHES = {"num_batches": 48, "seed": 3, "repetitions": 3, "rounds": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Steps of one kind of instance."""

    system: str  # "vllm": weights as vLLM packs them; "pengserve": weights in the arena
    num_instances: int  # that stepped at once
    model: CostModel
    mean_error: float  # relative, on the batches it was fitted on


def profile(plan: Plan, system: str, num_instances: int, weight_bytes: int) -> Profile:
    """Starts the engines, times, fits.

    Raises:
        RuntimeError: an engine failed.
    """
    engine = dict(plan.engine)
    if system == "vllm":
        engine["kv_cache_memory_bytes"] = plan.memory_bytes - weight_bytes
        config = InstanceConfig(app="bench", model=str(plan.model), engine=engine)
    else:
        engine.pop("kv_cache_memory_bytes")
        memory, stages = plan.memory_bytes, num_instances
        config = InstanceConfig(
            app="bench",
            model=str(plan.model),
            engine=engine,
            memory_bytes=memory,
            max_stages=stages,
            chunk_bytes=1 << 16,
        )
    command = [sys.executable, "-m", "benchmarks.cost_model.engine", json.dumps(to_data(config)), json.dumps(BATCHES)]
    environment = {**os.environ, **OFFLINE, **process_environment(config)}
    engines = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(num_instances)
    ]
    try:
        found: dict[int, list[Sample]] = {}
        for engine_process in engines:
            text, _ = engine_process.communicate(timeout=plan.start_timeout_s)
            for line in text.splitlines():
                if line.startswith(MARK):
                    data = json.loads(line.removeprefix(MARK))
                    found.setdefault(data["batch"], []).append(from_data(Sample, data["sample"]))
    finally:
        for engine_process in engines:
            engine_process.kill()
            engine_process.wait()
    if any(engine_process.returncode for engine_process in engines):
        raise RuntimeError("an engine that was to time its steps failed; its last words are above")
    samples = [
        Sample(chunks=same[0].chunks, seconds=statistics.median(sample.seconds for sample in same))
        for _, same in sorted(found.items())
    ]
    model = fit(samples)
    error = float(relative_errors(model, samples).mean())
    return Profile(system=system, num_instances=num_instances, model=model, mean_error=error)
