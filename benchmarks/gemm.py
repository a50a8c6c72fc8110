"""What a matrix product takes, by how its weight lies: `python -m benchmarks.gemm`.

Writes `results/gemm.md`. Weights as a checkpoint has them are what lanes share
(`replicas/engine/lanes/shared_model.py`, whose `gemm` goes by it); packed where they lie they are an instance's that
has no such lanes (`replicas/memory/packed_weights.py`). float32, one thread.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import MIB, RESULTS, today
from benchmarks.result_files import facts_line, table
from pengserve.replicas.memory.packed_weights import pack_in_place

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
    Weight(name="3 MiB", num_outputs=1024, num_inputs=768),
    Weight(name="4 MiB", num_outputs=1024, num_inputs=1024),
    Weight(name="8 MiB", num_outputs=2048, num_inputs=1024),
    Weight(name="Qwen3-0.6B, qkv", num_outputs=4096, num_inputs=1024),
    Weight(name="Qwen3-0.6B, down", num_outputs=1024, num_inputs=3072),
    Weight(name="Qwen3-4B, qkv", num_outputs=6144, num_inputs=2560),
    Weight(name="Qwen3-4B, down", num_outputs=2560, num_inputs=9728),
)
WAYS = ("linear", "oneDNN", "packed")
Times = Mapping[int, tuple[float, ...]]
"""Rows -> median seconds of a call, by way; NaN where there is no such way."""
Product = Callable[[torch.Tensor], torch.Tensor]


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
def measure(weight: Weight, rows: Sequence[int] = ROWS, min_s: float = MIN_S) -> dict[int, tuple[float, ...]]:
    """The times of one weight."""
    shape = (weight.num_outputs, weight.num_inputs)
    num_copies = max(1, MODEL_BYTES // (4 * weight.num_outputs * weight.num_inputs))
    by_way = products([torch.randn(shape) for _ in range(num_copies)])
    found = {}
    for num_rows in rows:
        x = torch.randn(num_rows, weight.num_inputs)
        times: dict[str, list[float]] = {name: [] for name in by_way}
        for ways in by_way.values():
            ways[0](x)  # what is made once for a shape is made here
        # The ways take turns, so that drifts of the machine meet all.
        while any(len(taken) < MIN_CALLS or sum(taken) < min_s for taken in times.values()):
            for name, ways in by_way.items():
                times[name] += [_seconds(product, x) for product in ways]
        found[num_rows] = tuple(statistics.median(times[name]) if name in times else math.nan for name in WAYS)
    return found


def products(copies: Sequence[torch.Tensor]) -> dict[str, list[Product]]:
    """Each way's product with each of the weights; without "packed" where they cannot be packed where they lie."""
    found: dict[str, list[Product]] = {
        "linear": [partial(_linear, copy) for copy in copies],
        "oneDNN": [partial(_onednn, copy) for copy in copies],
    }
    packed = [product for copy in copies if (product := pack_in_place(copy.clone())) is not None]
    return found | {"packed": list(packed)} if len(packed) == len(copies) else found


def _linear(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


def _onednn(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def _seconds(product: Product, x: torch.Tensor) -> float:
    start_s = time.perf_counter()
    product(x)
    return time.perf_counter() - start_s


def faster_from(times: Times) -> int | None:
    """The fewest rows from which on oneDNN is the faster one at every number of rows; None where it never is."""
    found = None
    for num_rows in sorted(times, reverse=True):
        linear_s, onednn_s = times[num_rows][:2]
        if onednn_s >= linear_s:
            break
        found = num_rows
    return found


def demo_step(results: Mapping[Weight, Times]) -> Times:
    """The times of all matrix products of one step of the demo model."""
    shares = [(weight.num_in_step, times) for weight, times in results.items()]
    return {
        num_rows: tuple(sum(n * times[num_rows][way] for n, times in shares) for way in range(len(WAYS)))
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
        "# Matrix products by how the weight lies",
        "",
        f"`python -m benchmarks.gemm` on {today()}: `torch.nn.functional.linear` /",
        "`torch.ops.mkldnn._linear_pointwise` / the same with the weight packed where it lies; median µs of a call, by",
        "the number of rows (tokens of a step). float32, one thread, in turn.",
        f"Load average of the machine before the run, from other work: {load:.1f}.",
        "",
        facts_line(),
        "",
        *table(heading, rows, 2),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, shape: str, times: Times) -> list[str]:
    cells = [" / ".join(map(_us, seconds)) for seconds in times.values()]
    return [name, shape, *cells, str(faster_from(times) or "never")]


def _us(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1e6 * seconds:.{1 if seconds < 100e-6 else 0}f}"


if __name__ == "__main__":
    main()
