"""The table, the picture's file, and the JSON of a run."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.regret import plot
from benchmarks.regret.cases import OURS, SEED, STATIC_LABELS, UNTOLD, all_cases, left_out, small_cases
from benchmarks.regret.law import (
    LEAST_GOODPUT,
    MOST_TTFT,
    STABLE,
    WON,
    Ratios,
    best_static,
    broken,
    has_room,
    ratios,
)
from benchmarks.regret.run import Measured
from benchmarks.result_files import facts_line, table, write_result

_RATIOS = ("goodput", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
_HEADING = (
    "case", "best static", "requests", "its goodput /s", "its SLO", "our SLO", "goodput", "TTFT P50", "P99", "TPOT P50",
    "P99",
)  # fmt: skip


def rows(found: Sequence[Measured]) -> list[list[str]]:
    """The table: a row for each case, with PengServe's ratios to the best static layout, and levers' goodput ratios."""
    levers = levers_of(found)
    lines = [[*_HEADING, *levers, "law"]]
    for measured in found:
        best, whole = best_static(measured), measured.row(OURS)
        ours = _ratios_of(measured, OURS)
        cells = [_times(getattr(ours, name)) if ours else "-" for name in _RATIOS]
        alone = [_ratios_of(measured, lever) for lever in levers]
        lines.append(
            [
                measured.case.name,
                best.label,
                f"{measured.requests}",
                f"{best.goodput_per_s:.2f}",
                f"{best.attained:.0%}",
                f"{whole.attained:.0%}" if whole else "-",
                *cells,
                *(_times(lever.goodput) if lever else "-" for lever in alone),
                ", ".join(broken(measured)) or "kept",
            ]
        )
    return lines


def levers_of(found: Sequence[Measured]) -> list[str]:
    """Policies beside the static layouts and PengServe."""
    labels = dict.fromkeys(row.label for measured in found for row in measured.rows)
    return [label for label in labels if label not in (*STATIC_LABELS, OURS)]


def summary(found: Sequence[Measured]) -> list[str]:
    """How many cases keep the law, in a few sentences."""
    with_ours = [measured for measured in found if measured.row(OURS) is not None]
    if not with_ours:
        return []
    lost = [measured for measured in with_ours if "goodput" in broken(measured)]
    slow = [measured for measured in with_ours if "ttft" in broken(measured)]
    won = [m for m in with_ours if (found_ratios := _ratios_of(m, OURS)) and found_ratios.goodput >= WON]
    roomy = [measured for measured in with_ours if has_room(measured)]
    routed = _dispatch_alone(found)
    worst = min(with_ours, key=lambda measured: _goodput(measured))
    mean = math.exp(sum(math.log(max(0.01, _goodput(measured))) for measured in with_ours) / len(with_ours))
    return [
        f"Goodput below {LEAST_GOODPUT:g} of the best static layout's in {len(lost)} of {len(with_ours)} cases;"
        f" P99 TTFT above {MOST_TTFT:g} times its, where it is stable, in {len(slow)}.",
        f"Goodput at least {WON:g} times the best static layout's in {len(won)} cases, of {len(roomy)} in which it can"
        f" be: in the others that layout serves more than {1 / WON:.0%} of the requests in time.",
        f"Geometric mean of the goodput ratios {mean:.3f}; the lowest is {_goodput(worst):.2f}, of {worst.case.name}.",
        *_untold(found),
        *routed,
    ]


def _untold(found: Sequence[Measured]) -> list[str]:
    """What becomes of the law where requests do not say within what time they want their first tokens."""
    here = [measured for measured in found if measured.row(UNTOLD.label) is not None]
    if not here:
        return []
    lost = [m for m in here if "goodput" in broken(m, UNTOLD.label)]
    slow = [m for m in here if "ttft" in broken(m, UNTOLD.label)]
    won = [m for m in here if (over := _ratios_of(m, UNTOLD.label)) and over.goodput >= WON]
    return [
        f"Where PengServe is not told the limit of TTFT (`{UNTOLD.label}`): goodput below {LEAST_GOODPUT:g} in"
        f" {len(lost)} cases, P99 TTFT above {MOST_TTFT:g} times in {len(slow)}, goodput at least {WON:g} times in"
        f" {len(won)}."
    ]


def _dispatch_alone(found: Sequence[Measured]) -> list[str]:
    """What dispatch by predicted TTFT does to the layout dp, which is dispatched by the least load."""
    pairs = [(m, m.row("dispatch"), m.row("dp")) for m in found]
    over = {m.case.name: ratios(routed, plain).goodput for m, routed, plain in pairs if routed and plain}
    if not over:
        return []
    worst = min(over, key=lambda name: over[name])
    mean = math.exp(sum(math.log(max(0.01, value)) for value in over.values()) / len(over))
    return [
        f"Dispatch by predicted TTFT alone has {mean:.3f} times dp's goodput (geometric mean), and at least"
        f" {over[worst]:.2f} times ({worst})."
    ]


def text(found: Sequence[Measured], picture: str) -> str:
    """The report in Markdown."""
    heading, *body = rows(found)
    seconds = sum(row.cpu_s for measured in found for row in measured.rows)
    seed = found[0].case.seed
    whole = len(small_cases() if dataclasses.replace(found[0].case, seed=SEED) in small_cases() else all_cases())
    drawn = f"Arrivals are drawn with seed {seed}, " + (
        "on which the policies were tuned." if seed == SEED else f"and the policies were tuned with seed {SEED} alone."
    )
    lines = [
        "# PengServe against the best static layout", "",
        f"`make bench-regret`, {len(found)} of {whole} cases. Virtual time, simulated in {seconds:,.0f} s of a core."
        f" {drawn} {facts_line()}", "",
        f"![Ratios of goodput and of P99 TTFT]({picture})", "",
        "A case is `machine/trace/scale`; `benchmarks/regret/cases.yaml` lists machines and windows. Scale 1 is what"
        " vLLM dp serves, measured by `calibrate.py`. Each cluster has stood for 5 s when the first request comes."
        " Goodput counts requests within 5 times the mean TTFT and TPOT that dp has at scale 0.5; where less than 2 %"
        " of the requests are in time, 2 % count. The best static layout has the highest goodput of dp, tp2, tp4, pp2"
        " and pp4; of those within 0.5 % it is the one with the lowest P99 TTFT. All other columns are PengServe's over"
        " that layout's: goodput is better above 1, latencies are better below. The columns of single levers are ratios"
        " of goodput. Requests tell PengServe within what time they want their first tokens; vLLM cannot be told, nor"
        " are single levers, and `untold` is PengServe that is not.", "",
        f"The law: goodput at least {LEAST_GOODPUT:g}; P99 TTFT at most {MOST_TTFT:g} where at least {STABLE:.0%} of"
        " the best static layout's requests are within the limits.", "",
        *(f"- {sentence}" for sentence in summary(found)), "",
        *table(heading, body, num_words=2), "",
    ]  # fmt: skip
    lost = [measured for measured in found if broken(measured)]
    if lost:
        lines += ["## Cases that break the law", ""]
        lines += [f"- {measured.case.name}: {', '.join(broken(measured))}" for measured in lost] + [""]
    reasons = {(label, why) for measured in found for label, why in measured.left_out}
    lines += ["## Left out", ""] if reasons or left_out() else []
    lines += [f"- {label}: {why}" for label, why in sorted(reasons)]
    lines += [f"- {name}: {why}" for name, why in left_out().items()]
    return "\n".join(lines).rstrip() + "\n"


def write(folder: Path, found: Sequence[Measured], date: str, *, is_small: bool) -> tuple[Path, ...]:
    """Writes table, picture and JSON; their paths."""
    seed = found[0].case.seed
    name = ("regret-small" if is_small else "regret") + (f"-seed{seed}" if seed != SEED else "")
    record = {"cases": [case_record(measured) for measured in found]}
    json_path, text_path = write_result(folder, name, date, record, "")
    picture = text_path.with_suffix(".svg")
    picture.write_text(plot.draw(found), encoding="utf-8")
    text_path.write_text(text(found, picture.name), encoding="utf-8")
    return json_path, text_path, picture


def case_record(measured: Measured) -> dict[str, Any]:
    """A case as plain data: PengServe's ratios, and all runs with theirs."""
    best, ours = best_static(measured), _ratios_of(measured, OURS)
    return {
        "case": measured.case.name,
        **dataclasses.asdict(measured.case),
        "requests": measured.requests,
        "span_s": measured.span_s,
        **{f"limit_{name}": value for name, value in dataclasses.asdict(measured.limits).items()},
        "best_static": best.label,
        "is_stable": best.attained >= STABLE,
        **_named(ours),
        "broken": list(broken(measured)),
        "runs": [dataclasses.asdict(row) | _named(ratios(row, best)) for row in measured.rows],
        "left_out": dict(measured.left_out),
    }


def _named(found: Ratios | None) -> dict[str, float | None]:
    return {f"{name}_ratio": _plain(getattr(found, name)) if found else None for name in _RATIOS}


def _ratios_of(measured: Measured, label: str) -> Ratios | None:
    row = measured.row(label)
    return None if row is None else ratios(row, best_static(measured))


def _goodput(measured: Measured) -> float:
    found = _ratios_of(measured, OURS)
    return found.goodput if found is not None else 1.0


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _times(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "inf"
