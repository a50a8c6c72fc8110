"""Times steps of one engine, fits both models on a part of them, and runs both ways to form microbatches with ours."""

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import MIB
from pengserve.planners.cost_model import CostModel, Sample, fit, fit_token_count, relative_errors
from pengserve.planners.lookahead import (
    MicrobatchLimits,
    Work,
    form_by_tokens,
    form_microbatches,
    next_budget,
    next_by_tokens,
)
from pengserve.planners.pipeline import Bubble, Former, Job, serve, simulate
from pengserve.planners.types.config import InstanceConfig
from pengserve.replicas.profile_process import ProfilePlan, profile_engine
from pengserve.simulator.profiling import KINDS, kind_of

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
MAX_MODEL_LEN = 8192
NUM_PLANNED = 1000
PLANNINGS = 9


def _engine_flags() -> dict[str, Any]:
    return {
        "dtype": "float32",
        "enforce_eager": True,
        "async_scheduling": False,
        "kv_cache_memory_bytes": 256 * MIB,
        "block_size": 32,
        # Beyond what the model was trained for: how long a step takes does not depend on what the tokens say.
        "hf_overrides": {"max_position_embeddings": MAX_MODEL_LEN},
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A burst of requests of very different lengths, for the pipeline in virtual time."""

    num_requests: int = 300
    least_tokens: int = 16  # of a prompt; lengths are spread evenly over their logarithm
    most_tokens: int = 8000
    output_tokens: tuple[int, int] = (8, 64)
    over_s: float = 0.0  # arrivals are spread over so long; 0: all at once
    max_tokens: int = 512  # of a microbatch, however it is formed
    max_requests: int = 64
    min_tokens: int = 32
    max_running: int = 64  # requests at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One benchmark run."""

    model: Path
    num_batches: int = 150
    repetitions: int = 3  # steps of a batch in one round
    rounds: int = 8
    folds: int = 5  # each is held back once, and predicted by a model fitted on the others
    stages: tuple[int, ...] = (2, 4)
    load: Load = field(default_factory=Load)
    seed: int = 7
    engine: Mapping[str, Any] = field(default_factory=_engine_flags)

    def limits(self) -> MicrobatchLimits:
        """What a microbatch can hold."""
        load = self.load
        return MicrobatchLimits(max_tokens=load.max_tokens, max_requests=load.max_requests, min_tokens=load.min_tokens)

    def jobs(self) -> list[Job]:
        """The requests of the load."""
        source, load = random.Random(self.seed), self.load
        return [
            Job(
                request_id=f"r{index}",
                prompt_tokens=round(load.least_tokens * (load.most_tokens / load.least_tokens) ** source.random()),
                output_tokens=source.randint(*load.output_tokens),
                arrival_s=load.over_s * index / load.num_requests,
            )
            for index in range(load.num_requests)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of one model on batches of one kind, each held back from its fit."""

    model: str
    kind: str
    count: int
    mean: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """One way to form microbatches, in a pipeline of so many stages."""

    name: str
    stages: int
    prompts: Bubble  # all prompts at once, as one list of microbatches
    queued: Bubble  # served to the end: while prompts wait
    whole: Bubble


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was found."""

    samples: tuple[Sample, ...]
    folds: tuple[int, ...]  # by sample: which it was held back with
    ours: CostModel  # fitted on all, as below
    tokens_only: CostModel
    errors: tuple[Errors, ...]
    formations: tuple[Formation, ...]
    plan_next_s: float  # to choose the next microbatch out of `NUM_PLANNED` requests
    plan_all_s: float  # to form all microbatches of them
    num_planned: int  # microbatches that were formed


def measure(plan: Plan, on_step: Callable[[], None]) -> list[Sample]:
    """Times every batch in a process of its own.

    Raises:
        EngineError: the engine failed; with its last words.
    """
    os.environ.update(OFFLINE)  # for the engine's process
    config = InstanceConfig(app="bench", model=str(plan.model), degrees=(2,), engine=dict(plan.engine))
    wishes = ProfilePlan(num_batches=plan.num_batches, rounds=plan.rounds, repetitions=plan.repetitions, seed=plan.seed)
    return profile_engine(config, wishes, on_step)[1]


def evaluate(plan: Plan, samples: Sequence[Sample]) -> Result:
    """Fits, compares and simulates."""
    folds = [index % plan.folds for index in range(len(samples))]
    random.Random(plan.seed).shuffle(folds)
    kinds = [kind_of(sample) for sample in samples]
    found = {
        name: held_back_errors(fit_one, samples, folds)
        for name, fit_one in (("with attention", fit), ("tokens alone", fit_token_count))
    }
    errors = [
        _errors(name, kind, [e for e, own in zip(each, kinds, strict=True) if kind in ("all", own)])
        for kind in ("all", *(kind for kind in KINDS if kind in kinds))
        for name, each in found.items()
    ]
    ours, tokens_only = fit(samples), fit_token_count(samples)
    formations = [formation for stages in plan.stages for formation in formations_of(plan, ours, stages)]
    plan_next_s, plan_all_s, num_planned = planning(plan, ours)
    return Result(
        samples=tuple(samples),
        folds=tuple(folds),
        ours=ours,
        tokens_only=tokens_only,
        errors=tuple(errors),
        formations=tuple(formations),
        plan_next_s=plan_next_s,
        plan_all_s=plan_all_s,
        num_planned=num_planned,
    )


def held_back_errors(
    fit_one: Callable[[Sequence[Sample]], CostModel], samples: Sequence[Sample], folds: Sequence[int]
) -> list[float]:
    """The relative error of each sample, as a model predicts it that was fitted on the other folds."""
    errors = [0.0] * len(samples)
    for fold in set(folds):
        held_back = [index for index, own in enumerate(folds) if own == fold]
        model = fit_one([sample for sample, own in zip(samples, folds, strict=True) if own != fold])
        for index, error in zip(held_back, relative_errors(model, [samples[i] for i in held_back]), strict=True):
            errors[index] = float(error)
    return errors


def formations_of(plan: Plan, model: CostModel, stages: int) -> list[Formation]:
    """Token counting and lookahead on the same load."""
    jobs, load, limits = plan.jobs(), plan.load, plan.limits()
    prompts = prompts_of(jobs)

    def by_tokens(ready: Sequence[Work], in_flight_s: Sequence[float]) -> Mapping[str, int]:
        return next_by_tokens(ready, model, limits)

    lookahead: Former = partial(next_budget, model=model, limits=limits, max_in_flight=stages)
    found = []
    for name, batches, former in (
        ("token count", form_by_tokens(prompts, model, limits), by_tokens),
        ("lookahead", form_microbatches(prompts, model, limits, stages), lookahead),
    ):
        queued, whole = serve(jobs, former, stages, model, load.max_running)
        static = simulate(batches, stages, model)
        found.append(Formation(name=name, stages=stages, prompts=static, queued=queued, whole=whole))
    return found


def planning(plan: Plan, model: CostModel) -> tuple[float, float, int]:
    """Median seconds of choosing the next microbatch, and of forming all, of a long queue; and how many those are."""
    prompts = prompts_of(replace(plan, load=replace(plan.load, num_requests=NUM_PLANNED)).jobs())
    limits, stages = plan.limits(), max(plan.stages, default=2)
    found: list[list[float]] = [[], []]
    num_planned = 0
    for _ in range(PLANNINGS):
        started_s = time.perf_counter()
        next_budget(prompts, [1.0], model, limits, max_in_flight=stages)
        chosen_s = time.perf_counter()
        num_planned = len(form_microbatches(prompts, model, limits, stages))
        found[0].append(chosen_s - started_s)
        found[1].append(time.perf_counter() - chosen_s)
    return statistics.median(found[0]), statistics.median(found[1]), num_planned


def prompts_of(jobs: Sequence[Job]) -> list[Work]:
    """All prompts, waiting."""
    return [
        Work(request_id=job.request_id, prefix_tokens=0, num_tokens=job.prompt_tokens, is_prefill=True) for job in jobs
    ]


def as_data(result: Result) -> dict[str, Any]:
    """A result as JSON; a chunk as `[prefix, new]`."""
    data = asdict(result)
    data["samples"] = [
        {"seconds": s.seconds, "chunks": [[chunk.prefix_tokens, chunk.num_tokens] for chunk in s.chunks]}
        for s in result.samples
    ]
    return data


def _errors(name: str, kind: str, errors: Sequence[float]) -> Errors:
    return Errors(model=name, kind=kind, count=len(errors), mean=statistics.fmean(errors), worst=max(errors))
