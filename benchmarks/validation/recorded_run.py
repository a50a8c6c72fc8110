"""A recorded run of vLLM under overload, and its simulation.

vLLM 0.19 served Llama-3.1-8B on an RTX 4090: 300 ShareGPT requests, ten a second, into 41,408 tokens of KV
(casys-kaist/LLMServingSim, MIT). Nothing of the simulation is fitted on it: step times are measured ones of an L40S,
scaled to the 4090's data sheet and to rates that others measured on it.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.validation.figures import Figure, spread
from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.requests import Arrival
from pengserve.simulator.result import Result
from pengserve.simulator.run import simulate

FOLDER = (
    Path(__file__).parents[2].parent / "shared" / "profiles" / "overload_runs" / "RTX4090" / "Llama-3.1-8B"
)  # beside this repository, where it is present
CONFIG = Path(__file__).parent / "rtx4090.yaml"
BAR = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """What the run was asked, and what it did. Times are seconds since the first request was queued."""

    arrivals: tuple[Arrival, ...]
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]  # of requests of two tokens or more
    kv_percent: tuple[float, ...]  # in use, once a second
    end_s: float

    @classmethod
    def read(cls, folder: Path = FOLDER) -> "RecordedRun":
        """From `requests.jsonl` and `timeseries.csv`."""
        rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()]
        start_s = min(row["queued_ts"] for row in rows)
        with (folder / "timeseries.csv").open(encoding="utf-8", newline="") as file:
            kv_percent = tuple(float(row["kv_cache_pct"]) for row in csv.DictReader(file))
        return cls(
            arrivals=tuple(
                Arrival(
                    request_id=row["request_id"],
                    at_s=row["queued_ts"] - start_s,
                    prompt_tokens=row["input_toks"],
                    output_tokens=row["output_toks"],
                )
                for row in rows
            ),
            ttft_s=tuple(row["first_token_ts"] - row["queued_ts"] for row in rows),
            tpot_s=tuple(
                (row["last_token_ts"] - row["first_token_ts"]) / (row["output_toks"] - 1)
                for row in rows
                if row["output_toks"] > 1
            ),
            kv_percent=kv_percent,
            end_s=max(row["last_token_ts"] for row in rows) - start_s,
        )


def replay(run: RecordedRun, scheduler: str = "vllm", **cluster: object) -> Result:
    """The simulation; `cluster` are fields in place of the configuration's. The fast scheduler finds no prefixes."""
    config = SimulationConfig.load(CONFIG)
    if scheduler == "fast":
        cluster = {"prefix_caching": False, **cluster}
    changed = config.cluster.model_copy(update=cluster)
    return simulate(config.model_copy(update={"scheduler": scheduler, "cluster": changed}), run.arrivals)


def compare(run: RecordedRun, result: Result) -> list[Figure]:
    """All figures of the run, with their bars."""
    tpot_s = [outcome.tpot_s for outcome in result.outcomes if outcome.tpot_s is not None]
    ttft_s = [outcome.ttft_s for outcome in result.outcomes if outcome.ttft_s is not None]
    figures = []
    for name, real, simulated in (("TTFT", run.ttft_s, ttft_s), ("TPOT", run.tpot_s, tpot_s)):
        for what, *values in zip(("mean", "P50", "P90"), spread(real, 50, 90), spread(simulated, 50, 90), strict=True):
            figures.append(Figure(what=f"{what} {name}", real=values[0], simulated=values[1], bar=BAR))
    real_kv, kv = kv_curves(run, result)
    figures += [
        Figure(what="KV in use, area", real=float(real_kv.sum()), simulated=float(kv.sum()), bar=BAR, unit="% s"),
        Figure(
            what="KV in use, mean; and that with the mean distance of both curves",
            real=float(real_kv.mean()),
            simulated=float(real_kv.mean() + np.abs(kv - real_kv).mean()),
            bar=BAR,
            unit="%",
        ),
        Figure(what="last token", real=run.end_s, simulated=result.end_s, bar=None),
    ]
    return figures


def kv_curves(run: RecordedRun, result: Result) -> tuple[np.ndarray, np.ndarray]:
    """Percent of the KV in use at each second from 1 on, real and simulated, until both have ended."""
    at = {round(moment.at_s): 100.0 * moment.used_tokens / moment.held_tokens for moment in result.moments}
    seconds = range(1, max(len(run.kv_percent), max(at)) + 1)
    real = dict(enumerate(run.kv_percent, start=1))
    return np.array([real.get(t, 0.0) for t in seconds]), np.array([at.get(t, 0.0) for t in seconds])
