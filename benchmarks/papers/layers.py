"""Headline figures of LayerKV, OrbitFlow and FastSwitch, whose KV is partly on the host; rows L, O and S."""

from typing import Any

from benchmarks.papers.headline import Headline, named

SHAREGPT, FIXED = "layerkv-7b-sharegpt", "layerkv-7b-fixed"
YI, LLAMA = "layerkv-34b-sharegpt", "layerkv-70b-sharegpt"
TP2 = "orbitflow-8b-a6000-tp2"
A5000, TIGHT, A6000 = "orbitflow-8b-a5000", "orbitflow-8b-a5000-tight", "orbitflow-70b-a6000"
A10, A100 = "fastswitch-8b-a10", "fastswitch-32b-a100"
VLLM, TIERS = "vLLM", "PengServe, host tier"
ORBIT = "PengServe's placement (OrbitFlow)"
DEEPSPEED, FLEXGEN, FLEXGEN_PLUS = "DeepSpeed-like", "FlexGen", "FlexGen+"
SLO_AWARE, HEURISTIC = "SLO-aware static", "dynamic heuristic"
UNIFORM, NO_PAUSES, NO_DEPOSIT = "one spread for all", "per request, no pauses", "per request, pauses, no deposit"
SWAPS, RECOMPUTES, FAST = "vLLM swap", "vLLM recompute", "FastSwitch"
GROUPS, ASYNC = "FastSwitch, groups alone", "FastSwitch, no reuse"
SWAPS_RANDOM, FAST_RANDOM = "vLLM swap, random", "FastSwitch, random"
STATIC = (FLEXGEN_PLUS, SLO_AWARE, HEURISTIC)


def headlines() -> list[Headline]:
    """LayerKV's first."""
    return [*_layerkv(), *_orbitflow(), *_fastswitch()]


def _row(
    row: str, what: str, name: str, baseline: str, paper: str, scenario: str, subject: str, **more: Any
) -> Headline:
    return Headline(
        row=row, what=what, scenario=scenario, baseline=baseline, paper=paper, get=named(name), subject=subject, **more
    )


def _layerkv() -> list[Headline]:
    def row(row: str, what: str, name: str, paper: str, scenario: str = SHAREGPT, **more: Any) -> Headline:
        return _row(row, what, name, VLLM, paper, scenario, TIERS, **more)

    return [
        row("L1", "mean TTFT", "ttft_mean_s", "up to 69x"),
        row("L2", "P99 TTFT", "ttft_p99_s", "up to 45x"),
        row("L3", "SLOs kept (TTFT 3 s, TPOT 200 ms)", "slo_kept", "17.7-28.7 points", is_points=True, unit="%"),
        row("L4", "mean TTFT, prompts of 3,072", "ttft_mean_s", "up to about 10x", FIXED),
        row("L4", "throughput, prompts of 3,072", "requests_per_s", "about equal", FIXED, is_rate=True, unit="/s"),
        row("L5", "throughput", "requests_per_s", "above 0.97x", is_rate=True, unit="/s"),
        row("L5", "throughput, 34B", "requests_per_s", "above 0.97x", YI, is_rate=True, unit="/s"),
        row("L5", "throughput, 70B", "requests_per_s", "above 0.97x", LLAMA, is_rate=True, unit="/s"),
        row("L1", "mean TTFT, 34B", "ttft_mean_s", "about 5x at 6 requests/s (Fig. 6)", YI),
        row("L1", "mean TTFT, 70B", "ttft_mean_s", "about 10x at 6 requests/s (Fig. 6)", LLAMA),
    ]


def _orbitflow() -> list[Headline]:
    def row(row: str, what: str, name: str, baseline: str, paper: str, scenario: str = A5000, **more: Any) -> Headline:
        return _row(row, what, name, baseline, paper, scenario, **{"subject": ORBIT, **more})

    points = {"is_points": True, "unit": "%"}
    rate = {"is_rate": True, "unit": "/min"}
    return [
        *(row("O1", "TBT kept, scale 1.5", "tbt_kept", name, "up to +48 points", **points) for name in STATIC),
        *(row("O1", "TPOT kept, scale 1.5", "tpot_kept", name, "up to +66 points", **points) for name in STATIC),
        row("O2", "P95 TBT, scale 1", "tbt_p95_s", FLEXGEN, "1.28x (-21.7 %)", TIGHT),
        row("O2", "P95 TBT, scale 1", "tbt_p95_s", DEEPSPEED, "3.2x (-68.6 %)", TIGHT),
        row("O3", "P99 TBT, scale 1.5", "tbt_p99_s", DEEPSPEED, "2.9x (-65 %)"),
        row("O3", "P99 TPOT, scale 1.5", "tpot_p99_s", DEEPSPEED, "2.8x (-64 %)"),
        row("O3", "P99 TBT, scale 1.5", "tbt_p99_s", HEURISTIC, "1.03-1.10x"),
        row("O4", "throughput", "requests_per_min", DEEPSPEED, "3.3x", **rate),
        *(row("O4", "throughput", "requests_per_min", name, "1.04-1.52x", **rate) for name in STATIC),
        row("O5", "end to end, the price", "e2e_mean_s", HEURISTIC, "0.83-0.89x (+12-21 %)"),
        row("O6", "TBT kept, 128K tokens, four A6000", "tbt_kept", FLEXGEN_PLUS, "69.2 to above 85 %", A6000, **points),
        row("O6", "TBT kept, 128K tokens, four A6000", "tbt_kept", HEURISTIC, "32.9 to above 85 %", A6000, **points),
        *(row("O6", "TBT kept, tp2", "tbt_kept", name, "better (Fig. 10)", TP2, **points) for name in STATIC),
        row("O7", "TBT kept, scale 1", "tbt_kept", UNIFORM, "45.1 to 85.6 %", TIGHT, **points),
        row("O7", "TBT kept, scale 1", "tbt_kept", NO_PAUSES, "54.5 to 85.6 %", TIGHT, **points),
        row("O7", "TBT kept, scale 1", "tbt_kept", NO_DEPOSIT, "71 to 85.6 %", TIGHT, **points),
    ]


def _fastswitch() -> list[Headline]:
    def row(row: str, what: str, name: str, baseline: str, paper: str, scenario: str = A10, **more: Any) -> Headline:
        return _row(row, what, name, baseline, paper, scenario, **{"subject": FAST, **more})

    tails = (("P95 TTFT", "ttft_p95_s"), ("P99 TTFT", "ttft_p99_s"), ("P99.9 TTFT", "ttft_p99.9_s"))
    tails = (*tails, ("P99.9 TBT", "tbt_p99.9_s"))
    found = [
        row(label, what, name, SWAPS, paper, scenario)
        for label, scenario, papers in (
            ("S1", A10, ("5.8x", "4.1x", "3.7x", "2.0x")),
            ("S3", A100, ("1.7x", "1.6x", "1.4x", "11.2x")),
        )
        for (what, name), paper in zip(tails, papers, strict=True)
    ]
    found += [
        row(label, f"{what}, random", name, SWAPS_RANDOM, paper, scenario, subject=FAST_RANDOM)
        for label, scenario, papers in (
            ("S2", A10, ("4.3x", "3.7x", "2.5x", "2.7x")),
            ("S4", A100, ("1.4x", "1.5x", "1.4x", "3.6x")),
        )
        for (what, name), paper in zip(tails, papers, strict=True)
    ]
    return [
        *found,
        row("S1", "P99 TTFT", "ttft_p99_s", RECOMPUTES, "not given"),
        row("S5", "throughput", "tokens_per_s", SWAPS, "up to 1.334x", is_rate=True, unit="/s"),
        row("S5", "throughput", "tokens_per_s", SWAPS, "up to 1.444x", A100, is_rate=True, unit="/s"),
        row("S6", "waiting for copies, groups alone", "copied_waited_s", SWAPS, "up to 3.11x", subject=GROUPS),
        row("S7", "waiting for copies, asynchronous", "copied_waited_s", GROUPS, "not given", subject=ASYNC),
        row("S8", "blocks copied to the host", "copied_out_blocks", ASYNC, "2.1x (-53 %)", unit=" blocks"),
    ]
