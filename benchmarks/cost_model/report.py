"""Tables of errors and bubbles, and the files of a run."""

import json
from pathlib import Path

from benchmarks.cost_model.measure import NUM_PLANNED, Formation, Plan, Result, as_data
from benchmarks.result_files import facts_line, plan_data, table, write_result
from pengserve.planners.cost_model import TERMS

AIM_ERROR = 0.05
AIM_BUBBLE = 0.5  # of the bubble share that token counting has
ERROR_HEADING = ("batches", "model", "held back", "mean error", "worst error")
BUBBLE_HEADING = (
    "stages", "microbatches by", "bubble, prompts as one list", "bubble, while prompts wait", "bubble, to the end",
    "makespan s", "microbatches",
)  # fmt: skip


def error_rows(result: Result) -> list[list[str]]:
    """Rows of the first table."""
    return [[e.kind, e.model, str(e.count), _percent(e.mean), _percent(e.worst)] for e in result.errors]


def bubble_rows(result: Result) -> list[list[str]]:
    """Rows of the second table."""
    return [
        [
            str(f.stages),
            f.name,
            *(_percent(bubble.share) for bubble in (f.prompts, f.queued, f.whole)),
            f"{f.whole.makespan_s:.2f}",
            str(f.whole.num_microbatches),
        ]
        for f in result.formations
    ]


def aims(result: Result) -> list[str]:
    """One sentence for each aim: whether it was met."""
    ours, tokens = (next(e for e in result.errors if e.kind == "all" and e.model == name) for name in _models(result))
    sentences = [
        f"Mean error of at most {AIM_ERROR:.0%} on held-back batches: {_met(ours.mean <= AIM_ERROR)}, "
        f"{ours.mean:.1%}; without attention terms {tokens.mean:.1%}."
    ]
    for baseline, lookahead in _pairs(result):
        before, after = baseline.queued.share, lookahead.queued.share
        sentences.append(
            f"Lookahead at least halves the bubble share of {baseline.stages} stages while prompts wait: "
            f"{_met(after <= AIM_BUBBLE * before)}, {before:.1%} to {after:.1%}; the whole run takes "
            f"{lookahead.whole.makespan_s / baseline.whole.makespan_s:.2f} times as long."
        )
    return sentences


def is_met(result: Result) -> bool:
    """Whether all aims were met."""
    ours, tokens = (next(e for e in result.errors if e.kind == "all" and e.model == name) for name in _models(result))
    halved = all(b.queued.share >= a.queued.share / AIM_BUBBLE for b, a in _pairs(result))
    return ours.mean <= AIM_ERROR and ours.mean < tokens.mean and halved


def markdown(plan: Plan, result: Result, date: str) -> str:
    """The result for readers."""
    load = plan.load
    lines = [
        f"# Cost model and lookahead, {date}",
        "",
        f"`make bench-cost-model`: model {plan.model.name}, one engine, {len(result.samples)} batches of random "
        f"prefixes, new tokens and decodes. A batch's time is the median of {plan.repetitions} steps, in the "
        f"fastest of {plan.rounds} rounds. Each batch is held back once, with 1/{plan.folds} of all, and predicted by "
        "a model fitted on the others; coefficients and bubbles are of a model fitted on all.",
        f"Engine flags: `{json.dumps(dict(plan.engine))}`.",
        "",
        facts_line(),
        "",
        *(f"- {sentence}" for sentence in aims(result)),
        "",
        "## Errors on held-back batches",
        "",
        *table(ERROR_HEADING, error_rows(result), 2),
        "",
        "| coefficient | " + " | ".join(TERMS) + " | tokens of a tile |",
        "|---|" + "---:|" * (len(TERMS) + 1),
        *(
            f"| {name} | " + " | ".join(f"{getattr(model, term):.3g}" for term in TERMS) + f" | {model.tile_tokens} |"
            for name, model in zip(_models(result), (result.ours, result.tokens_only), strict=True)
        ),
        "",
        "## Bubbles of a pipeline in virtual time",
        "",
        f"{load.num_requests} requests, prompts of {load.least_tokens} to {load.most_tokens} tokens spread evenly over "
        f"their logarithm, {load.output_tokens[0]} to {load.output_tokens[1]} output tokens, "
        + (f"arriving over {load.over_s:g} s" if load.over_s else "all there at the start")
        + f"; at most {load.max_running} of them run at a time, and a microbatch has at most {load.max_tokens} tokens "
        f"and {load.max_requests} requests. A stage takes its share of what the fitted model says. Bubble: "
        "the share of the stages' time that they stand idle, between the first and the last microbatch of each.",
        "",
        *table(BUBBLE_HEADING, bubble_rows(result), 2),
        "",
        f"Out of {NUM_PLANNED} such requests the next microbatch is chosen in {result.plan_next_s * 1e3:.1f} ms; all "
        f"{result.num_planned} microbatches are formed in {result.plan_all_s * 1e3:.0f} ms.",
    ]
    return "\n".join(lines).rstrip() + "\n"


def write(folder: Path, plan: Plan, result: Result, date: str) -> tuple[Path, Path]:
    """Writes everything as JSON and the tables as Markdown; their paths."""
    record = {"plan": plan_data(plan), "result": as_data(result)}
    return write_result(folder, "cost_model", date, record, markdown(plan, result, date))


def _models(result: Result) -> list[str]:
    return list(dict.fromkeys(e.model for e in result.errors))


def _pairs(result: Result) -> list[tuple[Formation, Formation]]:
    """Token counting and lookahead, by number of stages."""
    return list(zip(result.formations[::2], result.formations[1::2], strict=True))


def _met(is_so: bool) -> str:
    return "met" if is_so else "not met"


def _percent(share: float) -> str:
    return f"{share:.1%}"
