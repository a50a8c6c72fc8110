"""`python -m benchmarks.validation`, from the root of the repository; writes `results/simulator-validation.md`.

Parts whose data is not there say so.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness import RESULTS, today
from benchmarks.overload.simulated import compare_all, newest_results
from benchmarks.result_files import facts_line, read_result, table
from benchmarks.simulator_scale import SCENARIOS, Scale
from benchmarks.simulator_scale import rows as scale_rows
from benchmarks.step_tables.host import DYNAMO, errors_of, read_points
from benchmarks.validation import recorded_run
from benchmarks.validation.figures import Figure, figure_table
from benchmarks.validation.recorded_run import RecordedRun, compare, replay
from pengserve.simulator.timing.choose import host

H100_POINTS = Path(__file__).parents[2].parent / "shared" / "profiles" / "h100_vllm_end_to_end.csv"  # where present
TICK = "A tick at 1000 instances:"  # how the line of tick.md begins that says whether its bar is met
H100_BAR = 0.10  # of mean errors
AS_L40S = str(Path(__file__).parent / "rtx4090-as-l40s.yaml")
OTHERS: Mapping[str, tuple[str, dict[str, object]]] = {  # -> scheduler, and fields of `cluster` in place of the given
    "as it was": ("vllm", {}),
    "preempted requests find none of their blocks again": ("fast", {}),
    "... and the host's part of a step is not hidden": ("fast", {"async_scheduling": False}),
    "... or the 4090 reaches the shares of its data sheet that an L40S does": ("fast", {"catalog": (AS_L40S,)}),
}


def main() -> int:
    """Compares everything that is there, writes and prints; the exit code says whether all bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    parts = [_recorded_run(), _h100(), _overload(), _scale(options.output), tick_part(options.output)]
    lines = [
        "# How near simulations come to what was measured",
        "",
        f"Written by `make bench-validation` on {today()}. Errors are simulated over real, less 1.",
    ]
    for part, _ in parts:
        lines += ["", *part]
    text = "\n".join([*lines, "", facts_line(), ""])
    path = options.output / "simulator-validation.md"
    path.write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(is_met for _, is_met in parts) else 1


def _recorded_run() -> tuple[list[str], bool]:
    lines = ["## vLLM under overload: Llama-3.1-8B on an RTX 4090", ""]
    if not recorded_run.FOLDER.exists():
        return [*lines, "The recorded run is not here."], True
    run = RecordedRun.read()
    results = {name: replay(run, scheduler, **cluster) for name, (scheduler, cluster) in OTHERS.items()}
    figures = {name: compare(run, result) for name, result in results.items()}
    first, *_ = results
    lines += [
        "A recorded run of vLLM 0.19 (casys-kaist/LLMServingSim, MIT): 300 ShareGPT requests, ten a second, into 41,408"
        " tokens of KV. vLLM's own scheduler decides here as well. Nothing was fitted on the run.",
        "",
        *figure_table(figures[first]),
        "",
        *(f"- {sentence}" for sentence in results[first].assumptions),
        "- Rates that the 4090 reaches are others' measurements, see `simulator/hardware/gpus.yaml`. They were"
        " looked up with the errors of this run known, in place of rates read off the run itself; nothing was changed"
        " after that. The last row below is what the data sheet alone gives.",
        "",
        "What counts for how much:",
        "",
        *_others(figures),
    ]
    return lines, all(figure.is_met for figure in figures[first])


def _others(figures: Mapping[str, list[Figure]]) -> list[str]:
    names = ("mean TTFT", "P90 TTFT", "mean TPOT", "P50 TPOT", "P90 TPOT", "KV in use, area")
    rows = []
    for name, found in figures.items():
        errors = {figure.what: f"{figure.error:+.1%}" for figure in found}
        rows.append([name, *(errors[what] for what in names)])
    return table(["error of", *names], rows)


def _h100() -> tuple[list[str], bool]:
    lines = ["## TPOT on H100", ""]
    if not H100_POINTS.exists():
        return [*lines, "The measured points are not here."], True
    everything = [*read_points(H100_POINTS), *read_points(H100_POINTS, DYNAMO)]
    held_back, whole = errors_of(read_points(H100_POINTS)[1::2], host()), errors_of(everything, host())[-1]
    bars = [*((errors, H100_BAR) for errors in held_back), (whole, H100_BAR)]
    rows = [
        [errors.name, f"{errors.mean:.1%}", f"{bar:.0%}", "met" if errors.mean <= bar else "missed"]
        for errors, bar in bars
    ]
    rows[-1][0] = f"all {len(everything)} dense points, those that the host's part was fitted on among them"
    lines += [
        "vLLM's TPOT as aiconfigurator measured it (Apache-2.0): dense models, TTFT below 5 s, closed loops. The host's"
        " part of a step was fitted to every second point; the rows but the last are of the others.",
        "",
        *table(["model", "mean error", "bar", ""], rows),
    ]
    return lines, all(errors.mean <= bar for errors, bar in bars)


def _overload() -> tuple[list[str], bool]:
    lines = ["## Runs of this project's own bench-overload", ""]
    paths, is_met = newest_results(), True
    if not paths:
        return [*lines, "No result of it has its requests yet: run `make bench-overload`."], True
    for path in paths:
        figures, notes = compare_all(read_result(path))
        is_met &= all(figure.is_met for figure in figures)
        lines += [
            f"`{path.name}`, all rounds of a system together.",
            "",
            *figure_table(figures),
            "",
            *(f"- {n}" for n in notes),
            "",
        ]
    return lines[:-1], is_met


def _scale(folder: Path) -> tuple[list[str], bool]:
    lines = ["## Scale", ""]
    paths = sorted(folder.glob("simulator-scale-*.json"), key=lambda path: path.name[-15:])
    if not paths:
        return [*lines, "Not measured yet: run `make bench-simulator`."], True
    data = read_result(paths[-1])
    scales = [Scale(**scale) for scale in data["scales"] if scale["scenario"] in SCENARIOS]
    return [*lines, f"From `{paths[-1].name}`.", "", *scale_rows(scales)], all(scale.is_met for scale in scales)


def tick_part(folder: Path) -> tuple[list[str], bool]:
    """Lines on the controller's tick, as `make bench-tick` left them, and whether its bar is met."""
    lines, path = ["## The controller's tick at 1,000 instances", ""], folder / "tick.md"
    if not path.exists():
        return [*lines, "Not measured yet: run `make bench-tick`."], True
    said = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(TICK)]
    is_met = bool(said) and "NOT within" not in said[0]
    return [*lines, *said, "", f"From [tick.md]({path.name}): {'met' if is_met else 'missed'}."], is_met


if __name__ == "__main__":
    sys.exit(main())
