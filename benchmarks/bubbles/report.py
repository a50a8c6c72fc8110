"""Tables of both ways, whether the aim was met, and the files of a run."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.bubbles.measure import Plan, Run
from benchmarks.result_files import facts_line, plan_data, table, write_result
from pengserve.planners.types.config import MicrobatchPolicy

AIM = 0.5  # of the bubble share that token counting has
NAMES = {MicrobatchPolicy.TOKENS: "token count", MicrobatchPolicy.LOOKAHEAD: "lookahead"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of the table: median, least and most of the rounds."""

    title: str
    get: Callable[[Run], float]
    shape: str


FIGURES = (
    Figure(title="bubble share while prompts wait", get=lambda run: run.queued.share, shape="{:.1%}"),
    Figure(title="bubble share to the end", get=lambda run: run.whole.share, shape="{:.1%}"),
    Figure(title="tokens/s, prompts and outputs", get=lambda run: run.tokens_per_s, shape="{:.0f}"),
    Figure(title="makespan (s)", get=lambda run: run.makespan_s, shape="{:.1f}"),
    Figure(title="TTFT P50 (ms)", get=lambda run: 1e3 * run.ttft_p50_s, shape="{:.0f}"),
    Figure(title="TTFT P99 (ms)", get=lambda run: 1e3 * run.ttft_p99_s, shape="{:.0f}"),
    Figure(title="TPOT P50 (ms)", get=lambda run: 1e3 * run.tpot_p50_s, shape="{:.1f}"),
    Figure(title="microbatches", get=lambda run: run.num_microbatches, shape="{:.0f}"),
    Figure(title="failed requests", get=lambda run: run.failed, shape="{:.0f}"),
)


def ratio(runs: Sequence[Run]) -> float:
    """Lookahead's bubble share while prompts wait over token counting's: the median over the rounds."""
    return statistics.median(ratios(runs))


def ratios(runs: Sequence[Run]) -> list[float]:
    """The same of each round."""
    share = {(run.way, run.round_index): run.queued.share for run in runs}
    rounds = sorted({run.round_index for run in runs})
    return [share[MicrobatchPolicy.LOOKAHEAD, i] / max(share[MicrobatchPolicy.TOKENS, i], 1e-9) for i in rounds]


def is_met(runs: Sequence[Run]) -> bool:
    """Whether lookahead at least halves the bubbles, and no request failed."""
    return ratio(runs) <= AIM and not any(run.failed for run in runs)


def run_line(run: Run) -> str:
    """A run in a few words."""
    stages = ", ".join(f"{share:.1%}" for share in run.queued.stages)
    return (
        f"bubbles {run.queued.share:.1%} while prompts wait (by stage {stages}; {run.queued.seconds:.1f} s), "
        f"{run.whole.share:.1%} to the end; {run.tokens_per_s:.0f} tokens/s, TTFT P50 {run.ttft_p50_s:.2f} s, "
        f"{run.num_microbatches} microbatches" + (f"; {run.failed} failed: {run.first_error}" if run.failed else "")
    )


def markdown(plan: Plan, runs: Sequence[Run], date: str) -> str:
    """The result for readers."""
    by_way = {way: [run for run in runs if run.way == way] for way in NAMES}
    columns = [f"{name}, {what}" for name in NAMES.values() for what in ("median", "least", "most")]
    rows = [[figure.title, *(cell for way in NAMES for cell in _cells(figure, by_way[way]))] for figure in FIGURES]
    verdict = "met" if is_met(runs) else "not met"
    each = ", ".join(f"{found:.2f}" for found in ratios(runs))
    lines = [
        f"# Bubbles of real pipelines, {date}",
        "",
        f"`make bench-bubbles`: model {plan.model.name.rpartition('-')[0] or plan.model.name}, {plan.num_instances} "
        f"instances as one pipeline, {plan.rounds} rounds, both ways in turn on the same requests. "
        f"{plan.num_requests} requests come at once; prompts of {plan.least_tokens} to {plan.most_tokens} tokens "
        f"spread evenly over their logarithm (and the chat template), {plan.output_tokens[0]} to "
        f"{plan.output_tokens[1]} output tokens. Engine flags: `{json.dumps(dict(plan.engine))}`.",
        "",
        facts_line(),
        "",
        f"- Lookahead at least halves the bubble share while prompts wait: {verdict}, {ratio(runs):.2f} times that of "
        f"token counting (rounds: {each}).",
        "",
        "Bubble: the share of the time from a stage's first microbatch to its last one in which it computes none while "
        "the pipeline has work, over all stages. What members do besides is in it: schedule, code and send messages, "
        "wait for a core that the ingress, the client or the controller has. A core that is taken from a stage while "
        "it computes counts as computing.",
        "",
        *table(("", *columns), rows),
        "",
        "Bubble share of each stage while prompts wait, the first stage first; the last one is the leader's:",
        "",
        *table(("round", "microbatches by", "stages"), _stage_rows(runs), 3),
    ]
    return "\n".join(lines).rstrip() + "\n"


def write(folder: Path, plan: Plan, runs: Sequence[Run], date: str) -> tuple[Path, Path]:
    """Writes everything as JSON and the tables as Markdown; their paths."""
    record = {"plan": plan_data(plan), "runs": [asdict(run) for run in runs]}
    return write_result(folder, f"bubbles{plan.num_instances}", date, record, markdown(plan, runs, date))


def _cells(figure: Figure, runs: Sequence[Run]) -> list[str]:
    values = [figure.get(run) for run in runs]
    return [figure.shape.format(value) for value in (statistics.median(values), min(values), max(values))]


def _stage_rows(runs: Sequence[Run]) -> list[list[str]]:
    return [
        [
            str(run.round_index + 1),
            NAMES[MicrobatchPolicy(run.way)],
            ", ".join(f"{share:.1%}" for share in run.queued.stages),
        ]
        for run in sorted(runs, key=lambda run: run.round_index)
    ]
