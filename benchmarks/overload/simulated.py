"""Simulations of this benchmark's own runs: `python -m benchmarks.overload.simulated RESULT.json`.

A result has all that a simulation needs: steps timed with all instances busy, memory, drop settings, and each request.
What it has not is what ingress, client and controller take of the same cores, and how fast the machine was then. That
is fitted on two levels, few and many requests at once, that were measured just before each run and again just after
it, and on no run: a factor on steps that makes time per token right over both, then seconds a step and a factor on
reading KV that make it right on each, then what the shortest TTFT of few is above that, as time before an instance has
a request (of five ways to tell it, all tried on the runs, the one that counts no wait). What stages of a pipeline do
besides their layers is fitted on a third level.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from benchmarks.harness import RESULTS
from benchmarks.overload.record import SIMULATED, Record
from benchmarks.result_files import read_result
from benchmarks.validation.figures import Figure, figure_table, spread
from pengserve.cluster.demo.checkpoint import LlamaShape
from pengserve.planners.cost_model import TERMS, CostModel
from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.requests import Arrival
from pengserve.simulator.result import Result
from pengserve.simulator.run import simulate
from tests.support.models import DEEP, EVEN, SHALLOW, TINY, WIDE

PROFILED = {"vllm-dp": "vllm", "dp": "pengserve", "drop": "pengserve", "pp": "pengserve"}  # whose steps they make
BARS = {"P50": 0.15, "P99": 0.25}
SHAPES: Mapping[str, LlamaShape] = {"tiny": TINY, "wide": WIDE, "deep": DEEP, "even": EVEN, "shallow": SHALLOW}
BYTES = 4  # float32
ROUNDS = 24  # of a search for the host's share
NEWTON_STEPS = 6  # at most, until both levels are `CLOSE`
CLOSE = 0.01  # in log(simulated / real) of P50 TPOT
Levels = Sequence[Sequence[Record]]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What else the cores do, and how fast they are, beside what was profiled."""

    share: float = 0.0  # of a step, that it takes more
    step_s: float = 0.0  # that a step takes more besides
    log_kv: float = 0.0  # logarithm of a factor on reading KV
    stage_s: float = 0.0  # what every stage of a pipeline does besides its layers
    request_s: float = 0.0  # before an instance has a request: HTTP, chat template, tokenizer
    misfit: float = math.nan  # mean |log(simulated / real)| of P50 TTFT and TPOT of the levels

    def added(self, model: CostModel) -> CostModel:
        """The cost model with it."""
        scaled = replace(model, **{term: (1.0 + self.share) * getattr(model, term) for term in TERMS})
        load_s, kv_read_s = scaled.load_s + self.step_s, scaled.kv_read_s * math.exp(self.log_kv)
        return replace(scaled, load_s=max(0.0, load_s), kv_read_s=kv_read_s)


LEAST_SHARE, MOST_SHARE = -0.5, 4.0
STEP_RANGE_S, LOG_KV_RANGE = (-0.02, 0.1), (-4.0, 2.0)
MOST_STAGE_S = MOST_REQUEST_S = 0.1


class Recorded:
    """A result's runs."""

    def __init__(self, data: Mapping[str, Any], *, scheduler: str = "vllm") -> None:
        """`data` is a result that `is_complete`."""
        self._plan, self._size, self._scheduler = data["plan"], data["size"], scheduler
        self.num_instances = int(self._size["num_instances"])
        self._processors = min(1.0, int(data["machine"]["cores"]) / self.num_instances)
        self.runs = [run for run in data["runs"] if run["system"] in SIMULATED]
        self.profiles = {profile["system"]: CostModel(**profile["model"]) for profile in self._size["profiles"]}

    def replay(self, system: str, records: Sequence[Record], host: Host) -> Result:
        """Serves the same requests at the same times on the simulated system."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "machine.yaml").write_text(yaml.safe_dump(self._catalog(system, host)), encoding="utf-8")
            config = SimulationConfig.parse({**self._config(system, host), "folder": folder})
            return simulate(config, arrivals_of(records))

    def fit_host(self, run: Mapping[str, Any]) -> Host:
        """What makes the TPOT of a run's levels right, and where it may form pipelines, of the level in pipelines."""
        system = "vllm-dp" if run["system"] == "vllm-dp" else "dp"
        sweeps = [[tuple(Record(**record) for record in level) for level in sweep] for sweep in run["levels"]]
        few, full = [sweep[0] for sweep in sweeps], [sweep[1] for sweep in sweeps]
        host = self._fitted(system, few, full)
        host = replace(host, request_s=self._waited_s(system, few, host))
        pipelined = [level for _, _, *more in sweeps for level in more]
        if pipelined:
            stage_s = _zero_of(lambda s: self._bias("pp", pipelined, replace(host, stage_s=s)), 0.0, MOST_STAGE_S)
            host = replace(host, stage_s=stage_s)
        found = [abs(error) for level in (*few, *full) for error in self._errors(system, level, host)]
        return replace(host, misfit=sum(found) / len(found))

    def _fitted(self, system: str, few: Levels, full: Levels) -> Host:
        """The share that is right over both, and what makes each right."""
        both = [*few, *full]
        share = _zero_of(lambda value: self._bias(system, both, Host(share=value)), LEAST_SHARE, MOST_SHARE)

        def biases(found: Floats) -> Floats:
            host = Host(share=share, step_s=float(found[0]), log_kv=float(found[1]))
            return np.array([self._bias(system, few, host), self._bias(system, full, host)])

        step_s, log_kv = _root_of(biases, deltas=(1e-3, 0.1), ranges=(STEP_RANGE_S, LOG_KV_RANGE)).tolist()
        return Host(share=share, step_s=step_s, log_kv=log_kv)

    def _waited_s(self, system: str, few: Levels, host: Host) -> float:
        """By how much the shortest TTFT of few requests is above what steps take, the least of the sweeps.

        Whoever waits least has nobody before it, and whatever else happens on the machine only adds. Time before an
        instance has a request moves its steps and makes none longer, so that what was fitted stays.
        """
        found = []
        for level in few:
            real_s = min(record.first_s - record.at_s for record in level)
            ttft_s = [o.ttft_s for o in self.replay(system, level, host).outcomes if o.ttft_s is not None]
            found.append(real_s - min(ttft_s))
        return min(MOST_REQUEST_S, max(0.0, min(found)))

    def _bias(self, system: str, levels: Levels, host: Host) -> float:
        """Mean log(simulated / real) of the levels' P50 TPOT."""
        return sum(self._errors(system, level, host)[1] for level in levels) / len(levels)

    def _errors(self, system: str, level: Sequence[Record], host: Host) -> tuple[float, float]:
        """log(simulated / real) of the P50 of TTFT and of TPOT of one level."""
        found = compare(level, self.replay(system, level, host))
        ttft, tpot = (math.log(figure.simulated / figure.real) for figure in found if "P50" in figure.what)
        return ttft, tpot

    def _catalog(self, system: str, host: Host) -> dict[str, Any]:
        """A catalog of the machine as it was timed."""
        name, engine = str(self._plan["model"]), self._plan["engine"]
        shape = SHAPES[name.partition("-")[0]]
        embedding_params = 2 * shape.vocab_size * shape.hidden_size
        profile = {
            "gpu": "cpu",
            "model": {
                "layers": shape.num_layers,
                "hidden": shape.hidden_size,
                "heads": shape.num_heads,
                "kv_heads": shape.num_kv_heads,
                "head_dim": shape.head_dim,
                "params": embedding_params + self._droppable_params(shape),
                "embedding_params": embedding_params,
                "max_model_len": int(engine["max_model_len"]),
                "bytes_per_param": BYTES,
                "bytes_per_kv_value": BYTES,
            },
            "cost_model": asdict(host.added(self.profiles[PROFILED[system]])),
            "host_s": host.stage_s,
            "held_back_error": 0.0,
            "num_samples": 1,
            "max_num_batched_tokens": int(engine["max_num_batched_tokens"]),
            "kv_tokens": self._held_by(system) // self.num_instances,
            "block_size": int(engine["block_size"]),
            "source": "bench-overload",
        }
        return {"profiles": {"measured": profile}}

    def _held_by(self, system: str) -> int:
        """Tokens of KV that all instances hold in dp. vLLM's hold a little more: it rounds to no chunks."""
        dp_tokens = int(self._size["calibration"]["dp_tokens"])
        seen = (int(run["timeline"]["capacity"][0][1]) for run in self.runs if run["system"] == system == "vllm-dp")
        return next(seen, dp_tokens)

    def _droppable_params(self, shape: LlamaShape) -> int:
        """Of an instance: as many as free what pipelines were seen to hold more, rounding and all."""
        found, stages = self._size["calibration"], int(self._plan["stages"])
        more_tokens = int(found["pp_tokens"]) - int(found["dp_tokens"])
        token_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers * BYTES
        instance_bytes = more_tokens * token_bytes // self.num_instances
        return instance_bytes // BYTES * stages // (stages - 1)  # each keeps one part of so many

    def _config(self, system: str, host: Host) -> dict[str, Any]:
        engine = self._plan["engine"]
        cluster = {
            "profile": "measured",
            "catalog": ["machine.yaml"],
            "instances": self.num_instances,
            "gpus_per_node": max(8, self.num_instances),
            "block_size": engine["block_size"],
            "max_model_len": engine["max_model_len"],
            "max_num_seqs": engine["max_num_seqs"],
            "max_num_batched_tokens": engine["max_num_batched_tokens"],
            "request_s": host.request_s,
            "processors": self._processors,
            "prefix_caching": self._scheduler == "vllm" and bool(engine["enable_prefix_caching"]),
        }
        policy: dict[str, Any] = {"name": "vllm_dp"}
        if system in ("pp", "drop"):
            cluster["max_stages"] = self._plan["stages"]
        if system == "pp":
            policy = {"name": "vllm_pp", "options": {"stages": self._plan["stages"]}}
        if system == "drop":
            drop = {"restore_below": self._plan["restore_below"], "quiet_s": 0.5}
            policy = {"name": "pengserve", "options": {"drop": drop}}
        return {
            "name": f"bench-overload-{system}",
            "cluster": cluster,
            "policy": policy,
            "scheduler": self._scheduler,
        }


def is_complete(data: Mapping[str, Any]) -> bool:
    """Whether a result has what a simulation of its runs needs."""
    return bool(data["size"]["profiles"]) and any(run["requests"] and run["levels"] for run in data["runs"])


def newest_results(folder: Path = RESULTS) -> list[Path]:
    """The newest complete result of each number of instances and peak of demand."""
    newest: dict[tuple[int, float], tuple[str, Path]] = {}
    for path in folder.glob("overload[0-9]*.json"):
        data = read_result(path)
        if is_complete(data):
            load = int(data["size"]["num_instances"]), float(data["plan"]["peak_share"])
            found = str(data["date"]), path
            newest[load] = max(found, newest.get(load, found))
    return [path for _, (_, path) in sorted(newest.items())]


def arrivals_of(records: Sequence[Record]) -> list[Arrival]:
    """What the simulation is asked: the same lengths at the same times."""
    return [
        Arrival(
            request_id=f"r{index:05}",
            at_s=max(0.0, record.at_s),
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
        )
        for index, record in enumerate(records)
    ]


def compare(records: Sequence[Record], result: Result) -> list[Figure]:
    """TTFT and TPOT at P50 and P99."""
    ttft = [outcome.ttft_s for outcome in result.outcomes if outcome.ttft_s is not None]
    tpot = [outcome.tpot_s for outcome in result.outcomes if outcome.tpot_s is not None]
    real, simulated = _measured(records), _figures(ttft, tpot)
    return [
        Figure(what=what, real=real[what], simulated=seconds, bar=BARS[what.partition(" ")[0]])
        for what, seconds in simulated.items()
    ]


def _measured(records: Sequence[Record]) -> dict[str, float]:
    ttft = [record.first_s - record.at_s for record in records]
    return _figures(ttft, [(r.end_s - r.first_s) / (r.output_tokens - 1) for r in records if r.output_tokens > 1])


def _figures(ttft: Sequence[float], tpot: Sequence[float]) -> dict[str, float]:
    """Seconds, by name."""
    found = {"TTFT": spread(ttft, 50, 99)[1:], "TPOT": spread(tpot, 50, 99)[1:]}
    return {f"{what} {name}": s for name, both in found.items() for what, s in zip(BARS, both, strict=True)}


def repeatability(rounds: Sequence[Sequence[Record]]) -> dict[str, float]:
    """How far the farthest of several real rounds of one load is from the median of the others, as a share of that.

    What differs so much from round to round no simulation can foretell: machine and arrivals decide.
    """
    found = [_measured(records) for records in rounds]
    farthest = {}
    for what in found[0]:
        values = [figures[what] for figures in found]
        others = [float(np.median(values[:at] + values[at + 1 :])) for at in range(len(values))]
        farthest[what] = max(abs(value / other - 1.0) for value, other in zip(values, others, strict=True))
    return farthest


def compare_all(data: Mapping[str, Any], *, scheduler: str = "vllm") -> tuple[list[Figure], list[str]]:
    """All runs of a result, all rounds of a system together; and what was fitted, a sentence a run.

    Also, where there are several rounds, how far the real ones are apart.
    """
    figures, notes = [], []
    recorded = Recorded(data, scheduler=scheduler)
    for system in SIMULATED:
        rounds: list[list[Record]] = []
        outcomes: list[Any] = []
        result = None
        for run in (run for run in recorded.runs if run["system"] == system):
            host = recorded.fit_host(run)
            own = [Record(**record) for record in run["requests"]]
            result = recorded.replay(system, own, host)
            rounds.append(own)
            outcomes += result.outcomes
            notes.append(_note(recorded.num_instances, run, host))
        if result is not None:
            whole = replace(result, outcomes=tuple(outcomes))
            prefix = f"{recorded.num_instances} instances, {system}: "
            records = [record for own in rounds for record in own]
            figures += [replace(figure, what=prefix + figure.what) for figure in compare(records, whole)]
        if len(rounds) > 1:
            shares = ", ".join(f"{share:.0%} in {what}" for what, share in repeatability(rounds).items())
            notes.append(f"{recorded.num_instances} instances, {system}: real rounds differ by up to {shares}.")
    return figures, notes


def _note(num_instances: int, run: Mapping[str, Any], host: Host) -> str:
    """What was fitted for one run."""
    text = f"{num_instances} instances, {run['system']}, round {run['round_index'] + 1}: steps take"
    text += f" {1 + host.share:.2f} times as long and {1e3 * host.step_s:.1f} ms more,"
    text += f" reading KV {math.exp(host.log_kv):.2f} times that, requests {1e3 * host.request_s:.0f} ms before it"
    text += f" (P50 of the levels off by {host.misfit:.1%}, in the mean)"
    return text + (f", {1e3 * host.stage_s:.1f} ms a stage besides layers." if host.stage_s else ".")


def _zero_of(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that rises passes 0; the nearer end where it does not."""
    least = 1e-4 * (high - low)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
        if high - low < least:
            break
    return (low + high) / 2


def _root_of(
    function: Callable[[Floats], Floats], *, deltas: Sequence[float], ranges: Sequence[tuple[float, float]]
) -> Floats:
    """Where a function of as many numbers as it returns is nearly 0 in all, as near as a few steps of Newton's come."""
    least, most = np.array(ranges).T
    at = best = np.zeros(len(deltas))
    least_error = math.inf
    for _ in range(NEWTON_STEPS):
        values = function(at)
        error = float(np.abs(values).max())
        if error < least_error:
            least_error, best = error, at
        if error < CLOSE:
            break
        slopes = np.array([(function(at + axis) - values) / axis.sum() for axis in np.diag(deltas)]).T
        at = np.clip(at - np.linalg.lstsq(slopes, values, rcond=None)[0], least, most)
    return best


def main() -> int:
    """Prints the comparison of results; the exit code says whether all bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, help="JSON files of bench-overload; else the newest ones")
    parser.add_argument("--fast", action="store_true", help="the fast scheduler in place of vLLM's")
    options = parser.parse_args()
    paths = options.results or newest_results()
    if not paths:
        print("no result has its requests: run `make bench-overload` first", file=sys.stderr)
        return 2
    figures: list[Figure] = []
    for path in paths:
        found, notes = compare_all(read_result(path), scheduler="fast" if options.fast else "vllm")
        figures += found
        print(*figure_table(found), "", *notes, "", sep="\n")
    return 0 if figures and all(figure.is_met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
