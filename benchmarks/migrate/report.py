"""The table of migrations and drains: what streams noticed, and how long it took beside what the bytes need."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import MIB
from benchmarks.migrate import plot
from benchmarks.migrate.measure import DRAIN, ONE, Plan, Sample
from benchmarks.result_files import facts_line, plan_data, table, write_result

AIM_STEPS = 2  # that a stream may be silent, beyond the copy of its tail
AIM_IN_NEED = 1.5  # times as long as its bytes need, in which a drain is to be over
HEADING = (
    "case", "streams", "moved with KV", "MiB", "bytes need (ms)", "took (ms)", "times the need", "process ended (ms)",
    "longest gap (ms)", "undisturbed (ms)", "step (ms)", "gap in steps",
)  # fmt: skip
NAMES = {ONE: "one of two streams", DRAIN: "drain of an instance"}


def rows(samples: Iterable[Sample]) -> list[list[str]]:
    """A row for each case: median / maximum of its repetitions."""
    found = []
    for what in (ONE, DRAIN):
        group = [sample for sample in samples if sample.what == what]
        if not group:
            continue

        def of(
            get: Callable[[Sample], float | None], factor: float = 1e3, group: Sequence[Sample] = tuple(group)
        ) -> str:
            values = [value * factor for sample in group if (value := get(sample)) is not None]
            return f"{statistics.median(values):.1f} / {max(values):.1f}" if values else "-"

        found.append(
            [
                NAMES[what],
                of(lambda s: s.num_streams, 1),
                of(lambda s: s.num_moved, 1),
                of(lambda s: s.moved_bytes, 1 / MIB),
                of(lambda s: s.need_s),
                of(lambda s: s.moving_s),
                of(lambda s: s.in_need, 1),
                of(lambda s: s.done_s or None),
                of(lambda s: s.gap_s),
                of(lambda s: s.quiet_gap_s),
                of(lambda s: s.step_s),
                of(silent_steps, 1),
            ]
        )
    return found


def silent_steps(sample: Sample) -> float | None:
    """The longest gap in median steps of the same streams undisturbed."""
    return sample.gap_s / sample.step_s if sample.gap_s and sample.step_s else None


def is_within_aim(sample: Sample) -> bool | None:
    """Whether no stream was silent for longer than undisturbed and two steps more; None: there was no stream.

    The tail's copy is not taken by itself: it is part of what has to fit.
    """
    if sample.gap_s is None or sample.step_s is None or sample.quiet_gap_s is None:
        return None
    return sample.gap_s <= sample.quiet_gap_s + AIM_STEPS * sample.step_s


def aims(samples: Sequence[Sample]) -> list[str]:
    """One sentence for each aim: how often it was met."""
    sentences = []
    for what in (ONE, DRAIN):
        kept = [met for s in samples if s.what == what and (met := is_within_aim(s)) is not None]
        if kept:
            sentences.append(
                f"{NAMES[what].capitalize()}: no stream is silent for longer than the longest gap undisturbed and "
                f"{AIM_STEPS} steps: {sum(kept)} of {len(kept)}."
            )
    drains = [sample for sample in samples if sample.what == DRAIN]
    if drains:
        met = sum(sample.in_need <= AIM_IN_NEED for sample in drains)
        whole = sum(sample.num_moved == sample.num_streams and not sample.errors for sample in drains)
        sentences.append(
            f"All streams of a drained instance move with their KV, and none fails: {whole} of {len(drains)}."
        )
        sentences.append(
            f"A drain is over within {AIM_IN_NEED:g} times the time that its bytes need alone: {met} of {len(drains)} "
            f"(median {statistics.median(sample.in_need for sample in drains):.1f} times)."
        )
    return sentences


def failures(samples: Iterable[Sample]) -> list[str]:
    """One sentence for all that failed."""
    return [f"{NAMES[s.what]}, repetition {s.repetition}: {error}" for s in samples for error in s.errors]


def markdown(plan: Plan, samples: Sequence[Sample], rate: float, date: str) -> str:
    """The result for readers."""
    steal = max((sample.steal for sample in samples), default=0.0)
    lines = [
        f"# Migrations, {date}",
        "",
        f"`make bench-migrate`: model {plan.model.name}, two instances in dp, prompts of {plan.prompt_words} words. "
        f"First one of two streams moves ({plan.repetitions} times), then an instance with {plan.streams} streams is "
        f"drained into the other with as many ({plan.drains} times). Figures are median / maximum.",
        f"Engine flags: `{json.dumps(dict(plan.engine))}`.",
        "All instances, the ingress, the controller and the client share the cores of one machine.",
        f"Steal, the share of core time that the host gave to other machines: {steal:.1%} at most.",
        "",
        facts_line(),
        "",
        *(f"- {sentence}" for sentence in aims(samples)),
        "",
        *table(HEADING, rows(samples)),
        "",
        f"`bytes need`: the KV that moved, at {rate / MIB:.0f} MiB/s. So fast do its blocks go from one process to "
        "another by the same code with nothing beside. `took`: from the order, or from asking for the drain, until "
        "the source has no request; a look every 5 ms. `process ended`: until the drain is `safe_to_delete`. `longest "
        "gap`: the longest wait of any stream between two events, of the waits that overlap the move; `undisturbed`: "
        "the same streams at the same time of their lives, without a move. `step`: the median wait of these.",
        "",
        *(f"- {sentence}" for sentence in failures(samples)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def write(folder: Path, plan: Plan, samples: Sequence[Sample], rate: float, date: str) -> tuple[Path, ...]:
    """Writes everything as JSON, the table as Markdown, and the drains as SVG; their paths."""
    record = {"plan": plan_data(plan), "link_bytes_per_s": rate, "samples": [asdict(sample) for sample in samples]}
    paths = write_result(folder, "migrate", date, record, markdown(plan, samples, rate, date))
    picture = paths[0].with_suffix(".svg")
    picture.write_text(plot.draw([sample for sample in samples if sample.what == DRAIN]), encoding="utf-8")
    return (*paths, picture)
