"""As `notes.py`, for the scenarios whose KV is partly on the host."""

from collections.abc import Mapping

_LAYERKV = (
    "vLLM is vLLM 0.32's scheduler without a host tier; PengServe's side is its production tables, planners and"
    " copies in virtual time. Admission by TPOT SLOs (LayerKV's Eq. 1-2) is not in these figures: prompts are"
    " computed at once.",
    "Steps of an L20 are those of an L40S, scaled by the data sheets; a link of 16 GB/s a GPU, as two share 32 GB/s.",
)
_FLOPS = (
    "Not memory but FLOPS are short here: prompts alone take more of the GPUs than the sheet's 119.5 TFLOPS each"
    " give at the paper's rates.",
)
_ORBITFLOW = (
    "A batch has four requests; a prompt is computed alone while the others wait, as in vLLM 0.6. What is written"
    " goes to the host beside the steps, so that taking a layer off the device costs nothing.",
    "Copies follow each other in the order of the layers, through the cells that are free, as PengServe's copy"
    " engine does; the paper divides the link among requests. A batch that outgrows device and host preempts its"
    " newest request.",
    "The paper pauses the one request with the most KV and deposited tokens; ours weighs KV by slack, pauses as"
    " many as serve most tokens a second, and none for longer than 10 s.",
    "TBT kept is the share of tokens within the SLO; with the deposit, of tokens that a client waits for no longer.",
)
_MORE_PAUSES = (
    "Points come out higher than the paper's, because the baselines keep fewer SLOs here: a step with all of a"
    " batch of 32K tokens brings 16K tokens over 7.6 GB/s, 0.28 s, and none of them pauses a request. Pauses bring"
    " most of what OrbitFlow gains; placement by request alone brings little, as four requests leave few choices.",
    "O2 and O3: gaps are those in which tokens are generated. A pause is one long gap, of half a second and more, so"
    " P95 at scale 1 and P99 are those of pauses; TBT kept says what clients see of them with the deposit.",
    "O5: end-to-end latency is lower and not higher than the dynamic heuristic's, since the queue before the batch"
    " is shorter by more than pauses cost.",
)
_FASTSWITCH = (
    "A scheduler of its own serves the most urgent requests that fit; FastSwitch's parts and vLLM's are options of"
    " it. It shares no code with PengServe's host tier, which gets the same parts from runs, copies beside steps,"
    " and copies that stay valid. Priorities belong to conversations.",
    "vLLM's baseline copies 128 KB a call of 10 us, as the paper says, and all KV of a turn when it ends; block groups"
    " are 20 blocks (section 3.1). Keys of a block and layer of this LLaMA-8B are 32 KB: with calls of so much P99 TTFT"
    " on the A10 is 9.5x and not 3.5x.",
)
_OVERLOAD = (
    "Ratios depend on the load, which the paper does not give in tokens: memory is short here, and without that all are"
    " alike. Recompute is far behind: it also computes all earlier turns again.",
    "S6 and S7: with copies beside the steps nothing is waited for in this run, so that there is no ratio.",
    "S8: blocks of finished turns count too, which the baseline copies whole after each turn: reuse saves more here.",
)

ASSUMED: Mapping[str, tuple[str, ...]] = {
    "layerkv-7b-sharegpt": _LAYERKV,
    "layerkv-7b-fixed": _LAYERKV,
    "layerkv-34b-sharegpt": _LAYERKV,
    "layerkv-70b-sharegpt": _LAYERKV,
    "orbitflow-8b-a5000": _ORBITFLOW,
    "orbitflow-8b-a5000-tight": _ORBITFLOW,
    "orbitflow-8b-a6000-tp2": _ORBITFLOW,
    "orbitflow-70b-a6000": _ORBITFLOW,
    "fastswitch-8b-a10": _FASTSWITCH,
    "fastswitch-32b-a100": _FASTSWITCH,
}

REASONS: Mapping[str, tuple[str, ...]] = {
    "layerkv-7b-sharegpt": (
        "L1 to L3 come out. TPOT doubles for the slowest requests, which wait on the host for room: P99 TPOT is"
        " what PengServe misses SLOs by. How far above vLLM's limit the load is decides the ratio: at 3 requests a"
        " second mean TTFT is 3.5x lower, at 5 it is 84x, in runs of 100 s.",
    ),
    "layerkv-7b-fixed": (
        "L4: vLLM queues for longer than in the paper: its 17 requests fill the device, and 25 would be needed for"
        " this rate. TPOT pays for it, 203 ms against 87 ms.",
    ),
    "layerkv-34b-sharegpt": _FLOPS,
    "layerkv-70b-sharegpt": (*_FLOPS, "Four GPUs have room for all KV at this rate, so both run alike."),
    "orbitflow-8b-a5000": _MORE_PAUSES,
    "orbitflow-8b-a5000-tight": _MORE_PAUSES,
    "orbitflow-8b-a6000-tp2": _MORE_PAUSES[:1],
    "orbitflow-70b-a6000": (
        "The paper's curves are of 8K, 32K and 128K tokens; the batch's limit is 128K here, its mean is about half.",
    ),
    "fastswitch-8b-a10": _OVERLOAD,
    "fastswitch-32b-a100": (
        *_OVERLOAD,
        "The paper's A100 gains less in TTFT and more in TBT, and throughput: its load must be another than ours, at"
        " which both serve all that comes.",
    ),
}
