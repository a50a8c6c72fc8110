"""Which cases there are, and the simulations of each: `cases.yaml` as values.

A case is a trace at a scale on a machine. Its simulations are the static layouts of vLLM, PengServe, and PengServe with
a single lever.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness import ROOT
from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.build import machine_of, setup_of
from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.config import build, parse
from pengserve.simulator.traces.transforms import clip
from pengserve.simulator.traces.upscale import upscale

FOLDER = Path(__file__).parent
TRACES = ROOT.parent / "shared" / "traces"  # where they are present
CASES, CALIBRATED = FOLDER / "cases.yaml", FOLDER / "calibrated.yaml"
OURS = "pengserve"
SEED = 1  # of arrivals that are drawn: what the policies were tuned on
MOST_SPAN_S = 300.0  # of a trace that is stretched
LEAD_S = 5.0  # for which the cluster stands before the first request comes
WIDEST, MOST_STAGES = (2, 4), 4  # of the groups that PengServe may form
SLO_SCALE = 5.0  # KunServe's for chat; limits are so many times the mean that dp has at half load


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to serve a case."""

    label: str
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)
    tells_slo: bool = False  # requests say within what time they want their first tokens; vLLM cannot be told


STATIC = (
    Variant(label="dp", policy="vllm_dp"),
    Variant(label="tp2", policy="vllm_tp", options={"degree": 2}),
    Variant(label="tp4", policy="vllm_tp", options={"degree": 4}),
    Variant(label="pp2", policy="vllm_pp", options={"stages": 2}),
    Variant(label="pp4", policy="vllm_pp", options={"stages": 4}),
)
LEVERS = (
    Variant(label="merge", policy="pengserve", cluster={"degrees": WIDEST}),
    Variant(label="drop", policy="pengserve", cluster={"max_stages": MOST_STAGES}),
    Variant(label="migrate", policy="migration"),
    Variant(label="dispatch", policy="pengserve"),
)
UNTOLD = Variant(label="untold", policy="pengserve", cluster={"degrees": WIDEST, "max_stages": MOST_STAGES})
WHOLE = replace(UNTOLD, label=OURS, tells_slo=True)
VARIANTS = (*STATIC, WHOLE, UNTOLD, *LEVERS)
STATIC_LABELS = tuple(variant.label for variant in STATIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What counts as served in time."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A trace at a scale on a machine."""

    machine: str
    trace: str
    scale: float  # of what dp serves
    seed: int = SEED  # of arrivals that are drawn, and of which of a trace's requests come more than once

    @property
    def name(self) -> str:
        """As `--only` takes it."""
        return f"{self.machine}/{self.trace}/{self.scale:g}"


def all_cases() -> list[Case]:
    """Those of the folder of traces, and of a clone without it none; cases of one trace stand together."""
    data = _data()
    return [
        Case(machine=machine, trace=trace, scale=scale)
        for trace in data["traces"]
        for machine in data["machines"]
        for scale in data["scales"]
    ]


def small_cases() -> list[Case]:
    """Ten cases on traces that are generated here."""
    return [Case(machine=machine, trace=trace, scale=scale) for machine, trace, scale in _data()["small"]["cases"]]


def machines() -> tuple[str, ...]:
    """Names of all machines."""
    return tuple(_data()["machines"])


def cluster_of(machine: str) -> dict[str, Any]:
    """The `cluster` section of a machine's simulations."""
    return dict(_data()["machines"][machine]["cluster"])


def traces_of(machine: str) -> tuple[str, ...]:
    """Names of all traces that have cases on `machine`, generated ones last."""
    small = (case.trace for case in small_cases() if case.machine == machine)
    return tuple(dict.fromkeys([*_data()["traces"], *small]))


def left_out() -> dict[str, str]:
    """Files of the folder of traces that are no cases, and why."""
    return dict(_data()["left_out"])


def is_here(trace: str, folder: Path) -> bool:
    """Whether the trace is generated, or its files are in `folder`."""
    section = _section(trace)
    files = [section.get("file"), dict(section.get("lengths") or {}).get("file")]
    return all((folder / file).exists() for file in files if file is not None)


def arrivals_of(case: Case, folder: Path) -> tuple[Arrival, ...]:
    """The requests of a case, clipped to what an instance alone can serve.

    Where prompts share prefixes, fewer requests a second come later and none is left out: what they share would go.

    Raises:
        ConfigError: the trace cannot be read, or was not calibrated on this machine.
    """
    arrivals = clipped(case.machine, case.trace, folder, case.seed)
    factor = case.scale * rate_of(case.machine, case.trace) / (len(arrivals) / span_of(case.trace, folder, case.seed))
    if factor < 1 and any(arrival.prefix_ids for arrival in arrivals):
        found = stretched(arrivals, 1 / factor, MOST_SPAN_S)
    else:
        found = upscale(arrivals, factor, case.seed)
    return tuple(replace(arrival, at_s=round(arrival.at_s + LEAD_S, 6)) for arrival in found)


def stretched(arrivals: Sequence[Arrival], times: float, most_s: float) -> tuple[Arrival, ...]:
    """The same requests over so many times the seconds, as far as they come within `most_s`."""
    later = (replace(arrival, at_s=round(times * arrival.at_s, 6)) for arrival in arrivals)
    return tuple(arrival for arrival in later if arrival.at_s < most_s)


def clipped(machine: str, trace: str, folder: Path, seed: int = SEED) -> tuple[Arrival, ...]:
    """The requests of the trace's window as they were recorded, but for those longer than the machine's longest."""
    return clip(_window(trace, folder, seed), _data()["machines"][machine]["longest_tokens"])


def span_of(trace: str, folder: Path, seed: int = SEED) -> float:
    """Seconds of the trace's window that hold its requests."""
    arrivals = _window(trace, folder, seed)
    return max(1.0, arrivals[-1].at_s - arrivals[0].at_s)


def config_of(case: Case, variant: Variant, arrivals: tuple[Arrival, ...]) -> SimulationConfig:
    """The simulation of a case under one policy; its requests are handed over beside it."""
    has_prefixes = any(arrival.prefix_ids for arrival in arrivals)
    cluster = cluster_of(case.machine)
    if has_prefixes:  # with larger blocks vLLM's own scheduler takes a quarter of the time
        cluster |= {"prefix_caching": True, "block_size": 64}
    cluster |= variant.cluster
    return SimulationConfig.parse(
        {
            "name": f"{case.name}/{variant.label}",
            "seed": case.seed,
            "cluster": cluster,
            "scheduler": "vllm" if has_prefixes else "fast",  # vLLM's alone finds prefixes
            "policy": {"name": variant.policy, "options": dict(variant.options)},
        }
    )


def why_not(config: SimulationConfig) -> str:
    """Why a policy has no layout for a case; empty where it has."""
    try:
        machine_of(config, setup_of(config))
    except ConfigError as error:
        return str(error)
    return ""


def rate_of(machine: str, trace: str) -> float:
    """Requests per second that dp serves of a trace.

    Raises:
        ConfigError: it was not calibrated.
    """
    return float(_calibrated(machine, trace)["requests_per_s"])


def limits_of(machine: str, trace: str) -> Limits:
    """What counts as served in time there.

    Raises:
        ConfigError: it was not calibrated.
    """
    row = _calibrated(machine, trace)
    return Limits(ttft_s=row["ttft_s"], tpot_s=row["tpot_s"])


def _calibrated(machine: str, trace: str) -> Mapping[str, float]:
    found: Mapping[str, float] | None = _calibration().get(machine, {}).get(trace)
    if found is None:
        raise ConfigError(f"{trace} was not calibrated on {machine}: run python -m benchmarks.regret --calibrate")
    return found


def matching(cases: list[Case], patterns: list[str]) -> Iterator[Case]:
    """Cases whose name holds one of `patterns`; all where there is none."""
    return (case for case in cases if not patterns or any(pattern in case.name for pattern in patterns))


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    return data


@cache
def _calibration() -> dict[str, dict[str, dict[str, float]]]:
    if not CALIBRATED.exists():
        return {}
    return yaml.safe_load(CALIBRATED.read_text(encoding="utf-8")) or {}


def _section(trace: str) -> dict[str, Any]:
    data = _data()
    section = data["traces"].get(trace) or data["small"]["traces"].get(trace)
    if section is None:
        raise ConfigError(f"there is no trace {trace!r}: cases.yaml lists them")
    return dict(section)


@cache
def _window(trace: str, folder: Path, seed: int) -> tuple[Arrival, ...]:
    return build(parse(_section(trace), str(CASES)), seed, folder)
