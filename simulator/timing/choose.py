"""Step times of what a configuration names."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from pengserve.simulator.hardware.catalog import Gpu, ModelSpec, Profile
from pengserve.simulator.timing.coefficients import Host, TableTimes
from pengserve.simulator.timing.cost_model_times import CostModelTimes
from pengserve.simulator.timing.roofline import find
from pengserve.simulator.timing.steps import ModelTimes

NOT_OFF = 0.10  # profiles that are further off on held-back batches are said to be


@dataclass(frozen=True, slots=True)
class Timing:
    """Step times, and a sentence for each thing that had to be assumed for them."""

    times: ModelTimes
    assumptions: tuple[str, ...] = ()


def step_times(gpu: Gpu, model: ModelSpec, tp: int = 1, *, async_scheduling: bool = False) -> Timing:
    """Of a model on `tp` GPUs of one kind, from measured kernels.

    Raises:
        ConfigError: a mixture of experts, a CPU, or a degree that does not divide the heads.
    """
    coefficients, assumptions = find(gpu, model, tp)
    return Timing(TableTimes(coefficients, host(is_hidden=async_scheduling)), assumptions)


def profile_times(profile: Profile) -> Timing:
    """Of a profile, in the shape that was profiled."""
    notes: tuple[str, ...] = ()
    if profile.held_back_error > NOT_OFF:
        notes = (f"The profile {profile.name} is off by {profile.held_back_error:.0%} on batches held back from it.",)
    return Timing(CostModelTimes(profile.cost_model, host_s=profile.host_s), notes)


def host(*, is_hidden: bool = False) -> Host:
    """The host's part of a step, as `costs.yaml` has it."""
    row = costs()["host"]
    return Host(step_s=float(row["step_s"]), sequence_s=float(row["sequence_s"]), is_hidden=is_hidden)


@cache
def costs() -> dict[str, Any]:
    """`simulator/hardware/costs.yaml`."""
    text = files("pengserve.simulator.hardware").joinpath("costs.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return data
