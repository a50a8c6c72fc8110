"""`python -m benchmarks.step_tables.host POINTS`: the host's part of a step, from end-to-end points of vLLM on H100.

The tables time kernels alone. What a measured TPOT has beyond them is the engine's own work between two steps; fitted
to every second point, it goes into `simulator/hardware/costs.yaml`, and the errors printed are those of the others.
"""

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.step_tables.closed_loop import closed_loop
from pengserve.simulator.hardware.catalog import gpu, model
from pengserve.simulator.timing.coefficients import Host, TableTimes
from pengserve.simulator.timing.roofline import find

DENSE = {("Qwen/Qwen3-32B", ""): "qwen3-32b", ("meta-llama/Llama-3.1-70B", "fp8"): "llama3.1-70b-fp8"}
# Three points of NVIDIA Dynamo, whose concurrency cannot be that of one engine: below any table's TPOT. Not fitted on.
DYNAMO = {("Qwen/Qwen3-32B", "fp8"): "qwen3-32b-fp8"}
MAX_TTFT_S = 5.0
BUDGET = 8192  # tokens of a step: vLLM's default for servers on GPUs of 70 GB or more
ROUNDS = 3
PROBE = Host(step_s=1e-3, sequence_s=20e-6)  # TPOT is nearly linear in both: slopes come from steps of this size


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured row: equal requests in a closed loop."""

    model: str
    tp: int
    concurrency: int
    prompt: int
    output: int
    tpot_s: float

    def estimate_s(self, host: Host, budget: int = BUDGET) -> float:
        """TPOT from step times."""
        times = TableTimes(find(gpu("h100"), model(self.model), self.tp)[0], host)
        return closed_loop(
            times, concurrency=self.concurrency, prompt=self.prompt, output=self.output, budget=budget, rounds=ROUNDS
        ).tpot_s


def read_points(path: Path, kinds: Mapping[tuple[str, str], str] = DENSE) -> list[Point]:
    """Points of these models, of one engine each, whose TTFT is below 5 s; in the file's order."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["model_path"], row["precision"]) in kinds]
    return [
        Point(
            model=kinds[row["model_path"], row["precision"]],
            tp=int(float(row["tp_size"])),
            concurrency=int(float(row["batch_size"])),
            prompt=int(row["isl"]),
            output=int(row["osl"]),
            tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
        )
        for row in rows
        if row["batch_size"] and float(row["silicon_ttft_ms"]) < MAX_TTFT_S * 1e3
    ]


def fit_host(points: Sequence[Point]) -> Host:
    """Least squares of relative errors."""
    bare_s = [point.estimate_s(Host(step_s=0.0, sequence_s=0.0)) for point in points]
    slopes = [
        [
            (point.estimate_s(Host(step_s=PROBE.step_s, sequence_s=0.0)) - bare) / PROBE.step_s / point.tpot_s,
            (point.estimate_s(Host(step_s=0.0, sequence_s=PROBE.sequence_s)) - bare) / PROBE.sequence_s / point.tpot_s,
        ]
        for point, bare in zip(points, bare_s, strict=True)
    ]
    missing = [1.0 - bare / point.tpot_s for point, bare in zip(points, bare_s, strict=True)]
    (step_s, sequence_s), *_ = np.linalg.lstsq(np.array(slopes), np.array(missing), rcond=None)
    return Host(step_s=float(step_s), sequence_s=float(sequence_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of one model at one degree."""

    name: str
    count: int
    mean: float  # of absolute errors
    bias: float
    worst: float

    def __str__(self) -> str:
        share = f"{self.mean:.1%} | {self.bias:+.1%} | {self.worst:+.1%}"
        return f"| {self.name} | {self.count} | {share} |"


def errors_of(points: Sequence[Point], host: Host) -> list[Errors]:
    """By model and degree, and of all together at the end."""
    found: dict[str, list[float]] = {}
    for point in sorted(points, key=lambda point: (point.model, point.tp)):
        error = point.estimate_s(host) / point.tpot_s - 1.0
        found.setdefault(f"{point.model} tp{point.tp}", []).append(error)
    found["all"] = [error for errors in found.values() for error in errors]
    return [
        Errors(name=name, count=len(some), mean=fmean(map(abs, some)), bias=fmean(some), worst=max(some, key=abs))
        for name, some in found.items()
    ]


def main() -> int:
    """Fits on every second point, and prints both terms and the errors on the others."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_tables.host", description=__doc__)
    parser.add_argument("points", type=Path)
    points = read_points(parser.parse_args().points)
    host = fit_host(points[0::2])
    sys.stdout.write(
        f"{len(points[0::2])} of {len(points)} points: step_s {host.step_s:.3g}, sequence_s {host.sequence_s:.3g}\n\n"
        "| model | held-back points | mean error | bias | worst |\n|---|---:|---:|---:|---:|\n"
    )
    sys.stdout.writelines(f"{errors}\n" for errors in errors_of(points[1::2], host))
    return 0


if __name__ == "__main__":
    sys.exit(main())
