"""How long steps take where all instances are busy at once: what a simulation of the runs starts from.

As many engines as there are instances time the same batches, each in a process of its own, on the cores they share.
"""

import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.overload.load import Plan
from pengserve.planners.cost_model import CostModel, Sample, fit, relative_errors
from pengserve.planners.types.config import InstanceConfig
from pengserve.replicas.profile_process import ProfilePlan, profile_engine

BATCHES = ProfilePlan(num_batches=48, rounds=2, repetitions=3, seed=3)


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
        EngineError: an engine failed; with its last words.
    """
    engine = dict(plan.engine)
    if system == "vllm":
        engine["kv_cache_memory_bytes"] = plan.memory_bytes - weight_bytes
        config = InstanceConfig(app="bench", model=str(plan.model), engine=engine)
    else:
        engine.pop("kv_cache_memory_bytes")
        config = InstanceConfig(
            app="bench",
            model=str(plan.model),
            engine=engine,
            memory_bytes=plan.memory_bytes,
            chunk_bytes=plan.chunk_bytes,
            max_stages=plan.stages,
        )
    with ThreadPoolExecutor(num_instances) as engines:
        runs = [engines.submit(profile_engine, config, BATCHES, lambda: None) for _ in range(num_instances)]
        found = [future.result()[1] for future in runs]
    samples = [
        Sample(chunks=same[0].chunks, seconds=statistics.fmean(sample.seconds for sample in same))
        for same in zip(*found, strict=True)
    ]
    model = fit(samples)
    error = float(relative_errors(model, samples).mean())
    return Profile(system=system, num_instances=num_instances, model=model, mean_error=error)
