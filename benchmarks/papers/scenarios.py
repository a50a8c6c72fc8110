"""Which scenarios run under which policies, and their runs."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import ROOT
from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.result import Result
from pengserve.simulator.run import OnProgress, simulate

FOLDER = ROOT / "simulator" / "scenarios"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One policy of a scenario."""

    label: str
    policy: str
    options: Mapping[str, Any] | None = None  # None: as the scenario has them
    cluster: Mapping[str, Any] = field(default_factory=dict)  # what is another cluster than the scenario's


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulation, and the processor's seconds that it took."""

    scenario: str
    label: str
    config: SimulationConfig
    result: Result
    cpu_s: float


OURS = Variant(label="PengServe", policy="pengserve")
DP = Variant(label="vLLM (DP)", policy="vllm_dp", options={})
_KUNSERVE = (
    DP,
    Variant(label="vLLM (PP)", policy="vllm_pp", options={"stages": 2}),
    Variant(label="swap", policy="swap", options={}),
    Variant(label="migration", policy="migration", options={}),
    OURS,
)
_FLYING = (
    Variant(label="static DP", policy="vllm_dp", options={}),
    Variant(label="static TP", policy="vllm_tp", options={"degree": 4}),
    OURS,
)
NEVER_BACK = Variant(label="PengServe, no restore", policy="pengserve", options={"drop": {"restore_below": 0.0}})
EARLY_BACK = Variant(
    label="PengServe, restore below 70 %", policy="pengserve", options={"drop": {"restore_below": 0.7}}
)
WHOLE_MEMORY = {"kv_tokens": None}

SCENARIOS: Mapping[str, tuple[Variant, ...]] = {
    "kunserve-14b-burstgpt": (
        *_KUNSERVE,
        EARLY_BACK,
        NEVER_BACK,
        Variant(label="vLLM (DP), whole memory", policy="vllm_dp", options={}, cluster=WHOLE_MEMORY),
    ),
    "kunserve-14b-azure-lengths": (*_KUNSERVE, EARLY_BACK),
    "kunserve-14b-longbench": (*_KUNSERVE, EARLY_BACK),
    "kunserve-72b-extreme-burst": (DP, OURS),
    "flying-70b-bursty": _FLYING,
    "flying-70b-priority": _FLYING,
}


def configs(scenario: str, variants: Sequence[Variant] = ()) -> Iterator[tuple[str, SimulationConfig]]:
    """Label and configuration of each variant of a scenario."""
    config = SimulationConfig.load(FOLDER / f"{scenario}.yaml")
    for variant in variants or SCENARIOS[scenario]:
        options = config.policy.options if variant.options is None else variant.options
        data = config.model_dump() | {"policy": {"name": variant.policy, "options": options}, "folder": FOLDER}
        data["cluster"] = data["cluster"] | dict(variant.cluster)
        yield variant.label, SimulationConfig.parse(data)


def run(scenario: str, label: str, config: SimulationConfig, on_progress: OnProgress | None = None) -> Run:
    """Simulates one."""
    started_s = time.process_time()
    result = simulate(config, on_progress=on_progress)
    return Run(scenario=scenario, label=label, config=config, result=result, cpu_s=time.process_time() - started_s)
