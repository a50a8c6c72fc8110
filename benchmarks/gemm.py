"""From how many rows on oneDNN's matrix product is faster than torch's: `python -m benchmarks.gemm`.

Writes `results/gemm.md`. Weights as a checkpoint has them, nothing packed: that is what lanes share
(`replicas/engine/shared_model.py`, whose `_ONEDNN_MIN_ROWS` comes from here). float32, one thread.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness import MIB, RESULTS, today
from benchmarks.result_files import facts_line, table

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
MIN_CALLS = 15
MIN_S = 0.1  # of calls for each cell and way
MODEL_BYTES = 16 * MIB  # of copies of one weight, so that a call finds it where a step does: not in the nearest cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight of a model, `[num_outputs, num_inputs]`."""

    name: str
    num_outputs: int
    num_inputs: int
    num_in_step: int = 0  # of the demo model


WEIGHTS = (
    Weight(name="demo, q in tp2", num_outputs=128, num_inputs=256),
    Weight(name="demo, qkv", num_outputs=512, num_inputs=256, num_in_step=4),
    Weight(name="demo, out", num_outputs=256, num_inputs=256, num_in_step=4),
    Weight(name="demo, gate and up", num_outputs=1408, num_inputs=256, num_in_step=4),
    Weight(name="demo, down", num_outputs=256, num_inputs=704, num_in_step=4),
    Weight(name="demo, head", num_outputs=2048, num_inputs=256, num_in_step=1),
    Weight(name="Qwen3-0.6B, qkv", num_outputs=4096, num_inputs=1024),
    Weight(name="Qwen3-0.6B, down", num_outputs=1024, num_inputs=3072),
    Weight(name="Qwen3-4B, qkv", num_outputs=6144, num_inputs=2560),
    Weight(name="Qwen3-4B, down", num_outputs=2560, num_inputs=9728),
)
WAYS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": torch.nn.functional.linear,
    "oneDNN": lambda x, weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""),
}
Times = Mapping[int, tuple[float, float]]
"""Rows -> median seconds of a call of `linear` and of `oneDNN`."""


def main() -> None:
    """Measures all, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "gemm.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    text = report({weight: measure(weight) for weight in WEIGHTS}, load)
    options.output.write_text(text)
    sys.stdout.write(text)


@torch.inference_mode()
def measure(weight: Weight, rows: Sequence[int] = ROWS, min_s: float = MIN_S) -> dict[int, tuple[float, float]]:
    """The times of one weight."""
    shape = (weight.num_outputs, weight.num_inputs)
    num_copies = max(1, MODEL_BYTES // (4 * weight.num_outputs * weight.num_inputs))
    copies = [torch.randn(shape) for _ in range(num_copies)]
    found = {}
    for num_rows in rows:
        x = torch.randn(num_rows, weight.num_inputs)
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        for way in WAYS.values():
            way(x, copies[0])  # what is made once for a shape is made here
        # The ways take turns, so that drifts of the machine meet both.
        while any(len(taken) < MIN_CALLS or sum(taken) < min_s for taken in times.values()):
            for name, way in WAYS.items():
                times[name] += [_seconds(way, x, copy) for copy in copies]
        found[num_rows] = (statistics.median(times["linear"]), statistics.median(times["oneDNN"]))
    return found


def _seconds(way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, weight: torch.Tensor) -> float:
    start_s = time.perf_counter()
    way(x, weight)
    return time.perf_counter() - start_s


def faster_from(times: Times) -> int | None:
    """The fewest rows from which on oneDNN is the faster one at every number of rows; None where it never is."""
    found = None
    for num_rows in sorted(times, reverse=True):
        linear_s, onednn_s = times[num_rows]
        if onednn_s >= linear_s:
            break
        found = num_rows
    return found


def demo_step(results: Mapping[Weight, Times]) -> Times:
    """The times of all matrix products of one step of the demo model."""
    shares = [(weight.num_in_step, times) for weight, times in results.items()]
    return {
        num_rows: (
            sum(n * times[num_rows][0] for n, times in shares),
            sum(n * times[num_rows][1] for n, times in shares),
        )
        for num_rows in next(iter(results.values()))
    }


def report(results: Mapping[Weight, Times], load: float) -> str:
    """The table, as Markdown. `load` is the machine's load average before the run."""
    rows = [
        _row(weight.name, f"{weight.num_outputs} x {weight.num_inputs}", times) for weight, times in results.items()
    ]
    rows.append(_row("demo, all of a step", "", demo_step(results)))
    heading = ["weight", "outputs x inputs", *map(str, next(iter(results.values()))), "oneDNN faster from"]
    lines = [
        "# Matrix products over weights that are not packed",
        "",
        f"`python -m benchmarks.gemm` on {today()}: `torch.nn.functional.linear` /",
        "`torch.ops.mkldnn._linear_pointwise`, median µs of a call, by the number of rows (tokens of a step). float32,",
        "one thread, in turn.",
        f"Load average of the machine before the run, from other work: {load:.1f}.",
        "",
        facts_line(),
        "",
        *table(heading, rows, 2),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, shape: str, times: Times) -> list[str]:
    cells = [f"{_us(linear_s)} / {_us(onednn_s)}" for linear_s, onednn_s in times.values()]
    return [name, shape, *cells, str(faster_from(times) or "never")]


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.{1 if seconds < 100e-6 else 0}f}"


if __name__ == "__main__":
    main()
