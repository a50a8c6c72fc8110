"""Tables of switches: what the leader took, and what running streams noticed."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.result_files import facts_line, plan_data, table, write_result
from benchmarks.switch.measure import PROBE_S, Plan, Sample, Streams, as_data

AIM_CUTOVER_S = 0.015
AIM_STEPS = 2  # that a carried stream may wait beyond the switch itself
SWITCH_HEADING = (
    "instances", "load", "switch", "strategy", "drain", "meet", "cutover", "asked to done",
    "carried", "recomputed", "paused", "redirected", "KiB moved",
)  # fmt: skip
STREAM_HEADING = (
    "instances", "switch", "strategy", "longest gap", "same time before", "step before", "step after", "gap in steps",
    "within aim", "TTFT of a new request",
)  # fmt: skip
Case = tuple[int, bool, bool, str]


def cases(samples: Iterable[Sample]) -> dict[Case, list[Sample]]:
    """Samples that differ in their repetition alone, in the order of first appearance; without those that failed."""
    grouped: dict[Case, list[Sample]] = {}
    for s in samples:
        group = grouped.setdefault((s.num_instances, s.is_loaded, not s.is_merge, s.strategy), [])
        if s.report:
            group.append(s)
    return dict(sorted(grouped.items(), key=lambda item: item[0][:3]))


def is_within_aim(sample: Sample) -> bool | None:
    """Whether no stream waited longer than the switch and two steps, of whichever shape is slower; None: no stream."""
    seen = sample.streams
    if seen is None or seen.gap_s is None or seen.step_before_s is None:
        return None
    step_s = max(seen.step_before_s, seen.step_after_s or 0.0)
    return seen.gap_s <= sample.switch_s + AIM_STEPS * step_s


def switch_rows(samples: Iterable[Sample]) -> list[list[str]]:
    """Rows of the first table: milliseconds as median / maximum, counts as medians."""
    rows = []
    for (num_instances, is_loaded, is_split, strategy), group in cases(samples).items():
        head = [str(num_instances), "loaded" if is_loaded else "idle", _what(is_split), strategy]
        times = [_ms([s.report[name] for s in group]) for name in ("drain_s", "meet_s", "cutover_s")]
        counts = [
            _median([s.report[f"num_{name}"] for s in group])
            for name in ("carried", "recomputed", "paused", "redirected")
        ]
        kib = _median([s.report["carried_bytes"] / 1024 for s in group])
        rows.append([*head, *times, _ms([s.wall_s for s in group]), *counts, kib])
    return rows


def stream_rows(samples: Iterable[Sample]) -> list[list[str]]:
    """Rows of the second table, of switches under load."""
    rows = []
    for (num_instances, is_loaded, is_split, strategy), group in cases(samples).items():
        if not is_loaded:
            continue

        def of(get: Callable[[Streams], float | None], group: list[Sample] = group) -> list[float]:
            return [v for s in group if s.streams is not None and (v := get(s.streams)) is not None]

        steps = of(lambda seen: seen.gap_s / seen.step_before_s if seen.gap_s and seen.step_before_s else None)
        kept = [within for s in group if (within := is_within_aim(s)) is not None]
        rows.append(
            [
                str(num_instances),
                _what(is_split),
                strategy,
                _ms(of(lambda seen: seen.gap_s)),
                _ms(of(lambda seen: seen.quiet_gap_s)),
                _ms(of(lambda seen: seen.step_before_s)),
                _ms(of(lambda seen: seen.step_after_s)),
                _pair(steps, 1.0),
                f"{sum(kept)} of {len(kept)}" if kept else "-",
                _ms(of(lambda seen: seen.probe_ttft_s)),
            ]
        )
    return rows


def aims(samples: Sequence[Sample]) -> list[str]:
    """One sentence for each aim: how often it was met."""
    cutovers = [s.report["cutover_s"] for s in samples if s.report]
    loaded = [s.report["cutover_s"] for s in samples if s.report and s.is_loaded]
    carried = [w for s in samples if s.strategy == "carry" and s.is_loaded and (w := is_within_aim(s)) is not None]
    sentences = []
    for name, values in (("switches", cutovers), ("switches under load", loaded)):
        if values:
            met = sum(value <= AIM_CUTOVER_S for value in values)
            sentences.append(
                f"Cutover of at most {AIM_CUTOVER_S * 1e3:.0f} ms: {met} of {len(values)} {name}"
                f" (median {statistics.median(values) * 1e3:.1f} ms)."
            )
    if carried:
        sentences.append(
            f"With carry, no stream waits longer than one switch and {AIM_STEPS} steps: "
            f"{sum(carried)} of {len(carried)} switches."
        )
    return sentences


def failures(samples: Iterable[Sample]) -> list[str]:
    """One sentence for every switch in which something failed."""
    return [
        f"{s.num_instances} instances, {'loaded' if s.is_loaded else 'idle'}, {_what(not s.is_merge)}, {s.strategy}, "
        f"repetition {s.repetition}: {error}"
        for s in samples
        for error in s.errors
    ]


def markdown(plan: Plan, samples: Sequence[Sample], date: str) -> str:
    """The result for readers."""
    lines = [
        f"# Switches, {date}",
        "",
        f"`make bench-switch`: model {plan.model.name}, to and from the widest group of all instances. "
        f"{plan.idle_repetitions} repetitions idle, {plan.repetitions} under load "
        f"({plan.streams_per_instance} streams an instance), strategies in turn. Milliseconds are median / maximum.",
        f"Engine flags: `{json.dumps(dict(plan.engine))}`.",
        "All instances, the ingress, the controller and the client share the cores of one machine.",
        "",
        facts_line(),
        "",
        *(f"- {sentence}" for sentence in aims(samples)),
        "",
        "## What the leader took",
        "",
        "Drain, meet and cutover as in `SwitchReport`: the leader goes on stepping until all members have met. "
        "`asked to done` is the controller's: with prepare, commit and, under sequential and soft, the drain.",
        "",
        *table(SWITCH_HEADING, switch_rows(samples), 4),
        "",
        "## What streams noticed",
        "",
        "`longest gap`: the longest wait of any stream between two events, of the waits that overlap the switch; "
        "`same time before`: the same over as long a time without a switch. `step`: the median wait. `within aim`: the "
        "gap is "
        f"at most drain, meet and cutover together and {AIM_STEPS} steps of the slower shape. Under sequential and "
        "soft the streams end in the old shape. A hard merge pauses them: their gap lasts until the split. The new "
        f"request comes {PROBE_S * 1e3:.0f} ms after the switch is asked for.",
        "",
        *table(STREAM_HEADING, stream_rows(samples), 3),
        "",
        *(f"- {sentence}" for sentence in failures(samples)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def write(folder: Path, plan: Plan, samples: Sequence[Sample], date: str) -> tuple[Path, Path]:
    """Writes everything as JSON and the tables as Markdown; their paths."""
    record = {"plan": plan_data(plan), "samples": [as_data(sample) for sample in samples]}
    return write_result(folder, "switch", date, record, markdown(plan, samples, date))


def _what(is_split: bool) -> str:
    return "split" if is_split else "merge"


def _ms(values_s: Sequence[float]) -> str:
    return _pair(values_s, 1e3)


def _pair(values: Sequence[float], factor: float) -> str:
    return f"{statistics.median(values) * factor:.1f} / {max(values) * factor:.1f}" if values else "-"


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f}" if values else "-"
