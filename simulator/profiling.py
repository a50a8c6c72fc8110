"""`pengserve profile`: times an engine, fits the cost model, and writes a catalog that simulations read."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pengserve.planners.cost_model import CostModel, Sample, fit, relative_errors
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import ConfigError, PlanError
from pengserve.replicas.profile_process import EngineFacts, ProfilePlan, find_device, profile_engine
from pengserve.simulator.hardware.catalog import load_catalog

HELD_BACK = 0.3
KINDS = {"decodes": (True, False), "prefill": (False, True), "both": (True, True)}  # decodes, prefill
HEADER = "# Made by `pengserve profile`; a simulation takes it in place of a GPU and a model.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the command was asked for."""

    model: str
    output: Path
    name: str
    device: str
    gpu: str | None
    engine: tuple[str, ...]  # `name=value`
    num_batches: int
    rounds: int
    repetitions: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A cost model, and its mean relative error on batches that it has not seen: of all, and by kind."""

    costs: CostModel
    num_samples: int  # that it was fitted on
    error: float
    errors: Mapping[str, float]
    host_s: float = 0.0  # of a step: what is no work of layers


def run_profile(wishes: Wishes) -> None:
    """Measures with a progress bar, writes the profile, and says how good it is.

    Raises:
        ConfigError: a wish cannot be met; nothing was measured, or nothing written.
        EngineError: the engine failed.
    """
    if not wishes.output.resolve().parent.is_dir():
        raise ConfigError(f"the folder of {wishes.output} does not exist: make it first")
    device, console, catalog = find_device(wishes.device), Console(stderr=True), load_catalog()
    asked = wishes.gpu or ("cpu" if device == "cpu" else None)
    if asked is not None:
        catalog.gpu(asked)  # a wrong name is told before minutes of measuring
    model = str(Path(wishes.model).resolve()) if Path(wishes.model).is_dir() else wishes.model
    config = InstanceConfig(app="profile", model=model, device=device, engine=engine_arguments(wishes.engine))
    plan = ProfilePlan(
        num_batches=wishes.num_batches, rounds=wishes.rounds, repetitions=wishes.repetitions, seed=wishes.seed
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("engine starts", total=plan.num_batches * plan.rounds)
        facts, samples = profile_engine(
            config, plan, lambda: progress.update(task, advance=1, description="batches timed")
        )
    fitted = fit_held_back(samples, wishes.seed)
    gpu = asked or facts.device_name.removeprefix("NVIDIA ")
    try:
        gpu = catalog.gpu(gpu).name
    except ConfigError as error:
        console.print(f"{error}: under `gpus` in {wishes.output}, as `{gpu}`")
    write(wishes.output, profile_row(wishes, gpu, config.engine, facts, fitted), wishes.name)
    for kind, mean_error in fitted.errors.items():
        print(f"{kind:<8} mean error on held-back batches {mean_error:6.1%}")
    print(f"{'all':<8} mean error on held-back batches {fitted.error:6.1%}")
    console.print(f"wrote {wishes.output}: name it in a simulation as `catalog` and its row {wishes.name} as `profile`")


def engine_arguments(written: Sequence[str]) -> dict[str, Any]:
    """`["dtype=float32", "max_model_len=4096"]` as vLLM's arguments.

    Raises:
        ConfigError: one has no `=`, or a value that is no YAML.
    """
    found = {}
    for text in written:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise ConfigError(f"--engine {text} must be name=value, such as dtype=float32")
        try:
            found[name.strip().replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--engine {text}: {value!r} is no value that YAML knows; quote it") from None
    return found


def fit_held_back(samples: Sequence[Sample], seed: int) -> Fitted:
    """Fits on most of the samples, and tests on the others.

    Raises:
        ConfigError: they are too few, or too much alike.
    """
    order = list(range(len(samples)))
    random.Random(seed).shuffle(order)
    num_held_back = max(1, round(HELD_BACK * len(samples)))
    tested = [samples[index] for index in order[:num_held_back]]
    used = [samples[index] for index in order[num_held_back:]]
    try:
        costs = fit(used)
    except PlanError as error:
        raise ConfigError(f"{error}: raise --batches") from None
    by_kind = {kind: [sample for sample in tested if kind_of(sample) == kind] for kind in KINDS}
    return Fitted(
        costs=costs,
        num_samples=len(used),
        error=float(np.mean(relative_errors(costs, tested))),
        errors={kind: float(np.mean(relative_errors(costs, some))) for kind, some in by_kind.items() if some},
        host_s=float(np.median([sample.host_s for sample in samples])),
    )


def profile_row(
    wishes: Wishes, gpu: str, engine: Mapping[str, Any], facts: EngineFacts, fitted: Fitted
) -> dict[str, Any]:
    """The row of the catalog, as YAML takes it."""
    capacity = facts.capacity
    return {
        "gpu": gpu,
        "source": f"pengserve profile: {Path(wishes.model).name} on {facts.device_name}, {wishes.num_batches} batches",
        "model": {
            "layers": facts.layers,
            "hidden": facts.hidden,
            "heads": facts.heads,
            "kv_heads": facts.kv_heads,
            "head_dim": facts.head_dim,
            "params": max(1, capacity.weight_bytes // facts.value_bytes),
            "max_model_len": capacity.max_model_len,
            "bytes_per_param": float(facts.value_bytes),
            "bytes_per_kv_value": float(facts.kv_value_bytes),
            "experts": facts.experts,
        },
        "cost_model": asdict(fitted.costs),
        "host_s": round(fitted.host_s, 6),
        "held_back_error": round(fitted.error, 4),
        "num_samples": fitted.num_samples,
        "max_num_batched_tokens": facts.max_num_batched_tokens,
        "kv_tokens": capacity.num_tokens,
        "block_size": capacity.block_size,
        "engine": dict(engine),
    }


def write(path: Path, row: Mapping[str, Any], name: str) -> None:
    """Writes a catalog with this one profile.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(HEADER + yaml.safe_dump({"profiles": {name: dict(row)}}, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the profile to {path}: {error.strerror}") from None


def kind_of(sample: Sample) -> str:
    """Which of `KINDS` a batch is."""
    has = any(chunk.num_tokens == 1 for chunk in sample.chunks), any(chunk.num_tokens > 1 for chunk in sample.chunks)
    return next(kind for kind, wanted in KINDS.items() if wanted == has)
