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

_LAYERKV = (
    Variant(label="vLLM", policy="vllm_dp", options={}, cluster={"host_bytes": 0}),
    Variant(label="PengServe, host tier", policy="pengserve", options={}),
)
_OFFLOADING = (
    Variant(label="DeepSpeed-like", policy="deepspeed", options={}),
    Variant(label="FlexGen", policy="flexgen", options={}),
    Variant(label="FlexGen+", policy="flexgen", options={"is_plus": True}),
    Variant(label="SLO-aware static", policy="slo_aware", options={}),
    Variant(label="dynamic heuristic", policy="dynamic_heuristic", options={}),
    Variant(label="one spread for all", policy="orbitflow", options={"per_request": False}),
    Variant(label="per request, no pauses", policy="orbitflow", options={"pauses": False}),
    Variant(label="per request, pauses, no deposit", policy="orbitflow", options={"deposit": False}),
    Variant(label="PengServe's placement (OrbitFlow)", policy="orbitflow", options={}),
)


def _switching(every: int) -> tuple[Variant, ...]:
    base = {"every": every, "pattern": "markov"}
    return (
        Variant(label="vLLM swap", policy="vllm_priority", options=base),
        Variant(label="vLLM recompute", policy="vllm_priority", options={**base, "preemption": "recompute"}),
        Variant(
            label="FastSwitch, groups alone", policy="fastswitch", options={**base, "is_async": False, "reuse": False}
        ),
        Variant(label="FastSwitch, no reuse", policy="fastswitch", options={**base, "reuse": False}),
        Variant(label="FastSwitch", policy="fastswitch", options=base),
        Variant(label="vLLM swap, random", policy="vllm_priority", options={**base, "pattern": "random"}),
        Variant(label="FastSwitch, random", policy="fastswitch", options={**base, "pattern": "random"}),
    )


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
    "layerkv-7b-sharegpt": _LAYERKV,
    "layerkv-7b-fixed": _LAYERKV,
    "layerkv-34b-sharegpt": _LAYERKV,
    "layerkv-70b-sharegpt": _LAYERKV,
    "orbitflow-8b-a5000": _OFFLOADING,
    "orbitflow-8b-a5000-tight": _OFFLOADING,
    "orbitflow-8b-a6000-tp2": _OFFLOADING,
    "orbitflow-70b-a6000": _OFFLOADING,
    "fastswitch-8b-a10": _switching(25),
    "fastswitch-32b-a100": _switching(50),
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
