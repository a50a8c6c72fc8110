"""The papers' headline figures, and which of ours stands beside each.

A ratio is baseline / PengServe: above 1 PengServe is better. Rows K1 and so on are those of the papers' figures in the
order of their sections; `paper` is what the paper prints.
"""

from benchmarks.papers import layers
from benchmarks.papers.headline import OURS, Figures, Headline, named

BURST, AZURE, LONG = "kunserve-14b-burstgpt", "kunserve-14b-azure-lengths", "kunserve-14b-longbench"
EXTREME, BURSTY, PRIORITY = "kunserve-72b-extreme-burst", "flying-70b-bursty", "flying-70b-priority"
DP, PP = "vLLM (DP)", "vLLM (PP)"
BASELINES = (DP, PP, "swap", "migration")
NO_RESTORE = "PengServe, no restore"
EARLY_RESTORE = "PengServe, restore below 70 %"
STATIC_DP, STATIC_TP = "static DP", "static TP"


def _spike(figures: Figures) -> float:
    return figures["ttft_p99_s"] / figures["ttft_p50_s"]


def headlines() -> list[Headline]:
    """All of them, KunServe's first."""
    return [*_kunserve_tails(), *_kunserve_rest(), *_flying(), *layers.headlines()]


def _kunserve_tails() -> list[Headline]:
    names = {BURST: "12.7-72.2x over all workloads", LONG: "as above", AZURE: "not in the paper"}
    return [
        Headline(row="K1", what="P99 TTFT", scenario=scenario, baseline=label, paper=paper, get=named("ttft_p99_s"))
        for scenario, paper in names.items()
        for label in BASELINES
    ]


def _kunserve_rest() -> list[Headline]:
    long = [("ttft_p90_s", "P90 TTFT", "8.8x"), ("ttft_p99_s", "P99 TTFT", "11.7x")]
    long += [("ttft_p99.9_s", "P99.9 TTFT", "10.3x")]
    back = [("ttft_p50_s", "P50 TTFT", "1.39x (-28 %)"), ("tpot_p50_s", "P50 TPOT", "1.30x (-23 %)")]
    back += [("ttft_p99_s", "P99 TTFT", "6.4x"), ("tpot_p99_s", "P99 TPOT", "1.2x")]
    spikes = {DP: "239x", "swap": "92x", "migration": "148x"}
    return [
        Headline(
            row="K4", what="P50 TPOT, the price", scenario=LONG, baseline=DP, paper="0.81-0.86x (+15.8-22.7 %)",
            get=named("tpot_p50_s"),
        ),
        *(
            Headline(row="K7", what=what, scenario=LONG, baseline=DP, paper=paper, get=named(name))
            for name, what, paper in long
        ),
        *(
            Headline(
                row="K11", what=f"{what}, {when} against none", scenario=BURST, baseline=NO_RESTORE, paper=paper,
                get=named(name), subject=subject,
            )
            for subject, when in ((OURS, "restore"), (EARLY_RESTORE, "restore below 70 %"))
            for name, what, paper in back
        ),
        Headline(
            row="K12", what="from 60 s until memory is full", scenario=EXTREME, baseline=DP, paper="1.5x (92 s)",
            get=lambda figures: figures["full_at_s"] - 60.0, is_rate=True,
        ),
        *(
            Headline(
                row="K13", what=f"P99 / P50 of TTFT ({label}: {paper})", scenario=BURST, baseline=label,
                paper="not given for KunServe", get=_spike, unit="x",
            )
            for label, paper in spikes.items()
        ),
    ]  # fmt: skip


def _flying() -> list[Headline]:
    priority = (
        ("urgent_tpot_mean_s", "mean TPOT, urgent", {STATIC_TP: "0.92x (22, 24 ms)", STATIC_DP: "1.33x (32, 24 ms)"}),
        ("tpot_mean_s", "mean TPOT, all", {STATIC_TP: "0.79x (22, 28 ms)", STATIC_DP: "1.14x (32, 28 ms)"}),
        ("urgent_ttft_mean_s", "mean TTFT, urgent", {STATIC_TP: "0.85x (63, 74 ms)", STATIC_DP: "2.24x (166, 74 ms)"}),
        ("ttft_mean_s", "mean TTFT, all", {STATIC_TP: "15.0x (2130, 142 ms)", STATIC_DP: "1.17x (166, 142 ms)"}),
    )
    return [
        _bursty("F1", "P90 TTFT in bursts", STATIC_TP, "1.66x", "burst_ttft_p90_s"),
        _bursty("F3", "mean TTFT in bursts", STATIC_DP, "0.97x (4.23, 4.38 s)", "burst_ttft_mean_s"),
        _bursty("F4", "mean TTFT at low load", STATIC_TP, "0.95x (212, 223 ms)", "low_ttft_mean_s"),
        _bursty("F5", "median TPOT, all", STATIC_DP, "2.31x", "tpot_p50_s"),
        _bursty("F5", "median TPOT at low load", STATIC_DP, "not given", "low_tpot_p50_s"),
        _rate("F6", BURSTY, STATIC_DP, "0.97x (3169, 3059)"),
        _rate("F6", BURSTY, STATIC_TP, "2.03x"),
        *(
            Headline(row="F7", what=what, scenario=PRIORITY, baseline=label, paper=paper, get=named(name))
            for name, what, by_label in priority
            for label, paper in by_label.items()
        ),
        _rate("F7", PRIORITY, STATIC_TP, "1.20x (2530, 3040)"),
        _rate("F7", PRIORITY, STATIC_DP, "0.96x (3164, 3040)"),
    ]


def _bursty(row: str, what: str, baseline: str, paper: str, name: str) -> Headline:
    return Headline(row=row, what=what, scenario=BURSTY, baseline=baseline, paper=paper, get=named(name))


def _rate(row: str, scenario: str, baseline: str, paper: str) -> Headline:
    return Headline(
        row=row, what="peak tokens a second", scenario=scenario, baseline=baseline, paper=paper,
        get=named("peak_tokens_per_s"), is_rate=True, unit="/s",
    )  # fmt: skip
