"""How long large simulations take: `python -m benchmarks.simulator_scale`; writes `benchmarks/results/`.

The checked-in scenarios, each in a process of its own, from reading its configuration to its result. Times are of the
clock on the wall and of the core: on a machine that others use, the first says little. The production controller ticks
in them; how long its ticks take is of the clock on the wall, less what simulated instances take to say how they are.
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import percentile
from benchmarks.harness import RESULTS, ROOT, today
from benchmarks.result_files import facts_line, table, write_result
from benchmarks.timed_calls import timed_calls
from pengserve.controller.collector import spare_the_loop
from pengserve.controller.loop import Controller
from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.engine.port import SimPort
from pengserve.simulator.run import simulate
from pengserve.simulator.traces.config import parse

SCENARIOS = {"azure-8x": "vLLM's own", "thousand": "the fast one"}
FOLDER = ROOT / "simulator" / "scenarios"
AZURE = (
    ROOT.parent / "shared" / "traces" / "azure2023" / "azure_conv_norm.csv"
)  # in place of its generator, where present
MAX_MINUTES, MAX_GIB, MAX_TICK_S = 10.0, 8.0, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What one simulation took."""

    scenario: str
    trace: str
    num_instances: int
    num_requests: int
    num_refused: int
    num_tokens: int  # generated
    num_preemptions: int
    num_switches: int
    virtual_s: float
    wall_s: float
    core_s: float
    peak_gib: float  # of the process
    num_ticks: int  # of the controller
    tick_p50_s: float
    tick_p99_s: float

    @property
    def is_met(self) -> bool:
        """Whether it is fast and small enough, and so is its controller."""
        return self.wall_s < 60.0 * MAX_MINUTES and self.peak_gib < MAX_GIB and self.tick_p99_s <= MAX_TICK_S


def main() -> int:
    """Runs the scenarios that are asked for, prints and writes; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS), help=", ".join(SCENARIOS))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--here", action="store_true", help="run one in this process, and print what it took as JSON")
    options = parser.parse_args()
    for name in options.scenarios:
        if name not in SCENARIOS:
            parser.error(f"{name} is no scenario: choose among {', '.join(SCENARIOS)}")
    if options.here:
        print(json.dumps(dataclasses.asdict(measure(options.scenarios[0]))))
        return 0
    found = [_measure_apart(name) for name in options.scenarios]
    record = {"scales": [dataclasses.asdict(scale) for scale in found]}
    paths = write_result(options.output, "simulator-scale", today(), record, report(found))
    print(paths[1].read_text(encoding="utf-8"))
    return 0 if all(scale.is_met for scale in found) else 1


def measure(scenario: str) -> Scale:
    """Runs one, in this process."""
    started_s, core_s = time.perf_counter(), time.process_time()
    config = SimulationConfig.load(FOLDER / f"{scenario}.yaml")
    trace = "generator"
    if scenario.startswith("azure") and AZURE.exists():
        trace = AZURE.name
        longest = config.cluster.max_model_len
        own: dict[str, Any] = {"file": str(AZURE), "clip": longest}
        config = config.model_copy(update={"trace": parse(own)})
    spare_the_loop()  # as `pengserve simulate` does
    with timed_ticks() as ticks_s:
        result = simulate(config)
    kinds = Counter(event.kind for event in result.events)
    return Scale(
        scenario=scenario,
        trace=trace,
        num_instances=result.num_instances,
        num_requests=len(result.outcomes),
        num_refused=sum(bool(outcome.refused) for outcome in result.outcomes),
        num_tokens=sum(outcome.output_tokens for outcome in result.outcomes),
        num_preemptions=sum(outcome.num_preemptions for outcome in result.outcomes),
        num_switches=kinds["transition_end"],
        virtual_s=result.end_s,
        wall_s=time.perf_counter() - started_s,
        core_s=time.process_time() - core_s,
        peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
        num_ticks=len(ticks_s),
        tick_p50_s=percentile(ticks_s, 50),
        tick_p99_s=percentile(ticks_s, 99),
    )


@contextmanager
def timed_ticks() -> Iterator[list[float]]:
    """Collects how long each tick of the controller takes. In virtual time none of them waits for anything.

    What instances take to say how they are does not count: real ones do that by themselves, all at once.
    """
    ticks_s: list[float] = []
    with timed_calls([(Controller, "tick", "tick"), (SimPort, "statuses", "answers")]) as spent:
        timed = Controller.tick

        async def noted(controller: Controller) -> None:
            spent.clear()
            await timed(controller)
            ticks_s.append(spent["tick"] - spent["answers"])

        Controller.tick = noted  # `timed_calls` puts the first one back
        yield ticks_s


def _measure_apart(scenario: str) -> Scale:
    """Runs one in a new process, whose memory is then its own."""
    print(f"{scenario} runs", file=sys.stderr)
    command = [sys.executable, "-m", "benchmarks.simulator_scale", "--here", scenario]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return Scale(**json.loads(done.stdout.splitlines()[-1]))


def report(found: list[Scale]) -> str:
    """In Markdown."""
    return "\n".join(["# Scale of simulations", "", *rows(found), "", facts_line(), ""])


def rows(found: list[Scale]) -> list[str]:
    """The bars, and a table."""
    heading = ["scenario", "scheduler", "bar", "instances", "requests", "tokens", "switches"]
    heading += ["virtual", "wall", "core", "peak memory", "ticks", "tick P50", "tick P99"]
    lines = [
        [
            f"{scale.scenario} ({scale.trace})",
            SCENARIOS[scale.scenario],
            "met" if scale.is_met else "missed",
            f"{scale.num_instances:,}",
            f"{scale.num_requests:,}",
            f"{scale.num_tokens / 1e6:.1f} M",
            f"{scale.num_switches:,}",
            f"{scale.virtual_s:,.0f} s",
            f"{scale.wall_s:,.0f} s",
            f"{scale.core_s:,.0f} s",
            f"{scale.peak_gib:.2f} GiB",
            f"{scale.num_ticks:,}",
            f"{1e3 * scale.tick_p50_s:.1f} ms",
            f"{1e3 * scale.tick_p99_s:.1f} ms",
        ]
        for scale in found
    ]
    return [
        f"Bars: {MAX_MINUTES:g} minutes on the wall, {MAX_GIB:g} GiB; {1e3 * MAX_TICK_S:g} ms for 99 of 100 ticks of "
        "the controller. One process; importing vLLM is included.",
        "",
        *table(heading, lines, num_words=3),
    ]


if __name__ == "__main__":
    sys.exit(main())
