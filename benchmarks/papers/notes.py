"""What had to be assumed for each scenario, and why figures do not come out; one sentence or two each."""

from collections.abc import Mapping

from benchmarks.papers import layer_notes

_KUNSERVE_14B = (
    "The load was chosen among some that were tried, so that memory runs short and GPUs do not. Where GPUs run short"
    " too, drops do not help: with the whole memory, BurstGPT's lengths at 32 requests a second and bursts of 2.8"
    " times that, over the first 200 s, P99 TTFT was 5.6 s with drops and 3.3 s under data parallelism (0.59x). All"
    " figures are of one seed.",
    "vLLM (PP) fills its microbatches by token count, as vLLM does; with PengServe's lookahead its P99 TTFT is 1.6"
    " s, 3.3 s and 1.0 s (BurstGPT's, LongBench's and Azure's lengths), and 0.84x for Azure's: always having the room"
    " then helps most.",
    "The KV room of every policy is 2.1 (LongBench: 2.0) times the mean demand that data parallelism has without a"
    " limit, as in KunServe 2.2; a drop frees half of the weights on top of it, as on the real GPU. With less KV"
    " beside the same weights, a drop adds more than the paper's 57 %: see the column of the peak room.",
    "The rate, the height of the bursts and the spread of lengths are not in the paper; bursts last 40 s.",
    "Swap is vLLM's old swapping with both directions at once over PCIe; migration is one request at a time from"
    " each full instance to a free one, once a second.",
    "Baselines dispatch each request to the least virtual KV load; PengServe to where its first token is predicted to"
    " come soonest.",
)
_NO_TAIL = (
    "Ratios of P99 are lower than the paper's because its baselines queue for longer: a spike of 239 times P50 is"
    " some 30 s here. Our burst overloads memory by the column of the peak demand only, and ends after 40 s.",
    "Migration comes out as data parallelism does: the dispatcher keeps all instances equally full, so that none is"
    " below 60 % when another one is above 85 %. With LongBench's lengths not one request moved.",
)

ASSUMED: Mapping[str, tuple[str, ...]] = {
    "kunserve-14b-burstgpt": _KUNSERVE_14B,
    "kunserve-14b-azure-lengths": (
        *_KUNSERVE_14B,
        "Lengths are drawn from lognormal distributions with the trace's means and 99th percentiles.",
    ),
    "kunserve-14b-longbench": _KUNSERVE_14B,
    "kunserve-72b-extreme-burst": (
        "Lengths are those of LongBench, the workload that the paper shows for this model; with BurstGPT's our GPUs"
        " run out of FLOPS long before they run out of memory. The rate was chosen so that data parallelism lasts for"
        " about two minutes, as the paper's figures say of it (60 + 92 / 1.5 = 121 s).",
        "Memory is full when the demand of all requests in flight exceeds the room there is.",
    ),
    "flying-70b-bursty": (
        "Bursts last 10 s, lows 80 s; figures of low load are of each low's second half, when static TP has no queue"
        " left.",
        "`busy_requests` of the planner is 64: with its default of 8, which is for instances on CPUs, the cluster"
        " counts as busy at 2 requests a second and never merges.",
        "Steps of 8,192 tokens at most and 256 sequences a lane.",
    ),
    **layer_notes.ASSUMED,
    "flying-70b-priority": (
        "One request in five is urgent; static TP and DP put urgent requests first in their queues.",
        "`busy_requests` of the planner is 64, as in flying-70b-bursty.",
    ),
}

REASONS: Mapping[str, tuple[str, ...]] = {
    "kunserve-14b-burstgpt": (
        *_NO_TAIL,
        "K11: with the default `restore_below` of 0.5 parameters stay dropped between the two bursts: a cluster"
        " provisioned at 2.1 times its demand is about half full all the time, and fuller in pipelines, whose tokens"
        " take longer. With 0.7 they come back, and P50 TPOT falls. P50 TTFT gains less than in the paper: a pipeline"
        " costs decodes more than prompts here.",
        "With the whole memory of an A800 there is no overload at all at this rate: these lengths are bound by FLOPS"
        " in our step times, and 243,000 tokens a GPU, as the paper has, would need over 20 requests a second from"
        " each.",
    ),
    "kunserve-14b-azure-lengths": _NO_TAIL,
    "kunserve-14b-longbench": (
        *_NO_TAIL,
        "K7: prompts of 5,900 tokens take about 0.9 s by themselves at our prefill speed, so P50 is high for all;"
        " what is left of the tail under PengServe is queueing for FLOPS. After a drop the new pipelines are the"
        " emptiest, and the dispatcher, which goes by KV alone, sends them all requests for some seconds: with"
        " `restore_below` at 0.65, requests at 469 to 475 s waited up to 5 s there while others waited 0.5 s"
        " elsewhere.",
        "K4: pipelines stand for about a third of the run, so the median request pays less than in the paper.",
        "TTFT rises with `restore_below` here, unlike with the other lengths: with queued tokens counted four times"
        " in the dispatcher's load that went away, and the P99 of BurstGPT's lengths got worse, so it was left as it"
        " is.",
    ),
    "kunserve-72b-extreme-burst": (
        "K12 comes out. TTFT rises in both before memory is full, from a P50 of 0.75 s before the burst to 2 s:"
        " prompts of this length use up the GPUs' FLOPS at a rate that fills memory, and the paper has no SLO"
        " violation by then.",
    ),
    "flying-70b-bursty": (
        "F1: static TP needs 40 s and more to work off a burst here; the ratio depends on how long bursts and lows"
        " are, which the paper does not give. It was 5 with bursts of 15 s, lows of 60 s and steps of 2,048 tokens.",
        "F4: static TP still has some of its queue at the start of the second half of a low. In the last 20 s of"
        " each low its mean TTFT is 167 ms and PengServe's 188 ms, which is 0.89x: by then PengServe is in one group"
        " of all GPUs for seven eighths of the time.",
        "F5: the layout is dp for 42 % of the time, and more requests arrive then: so the median over all is near"
        " DP's. At low load alone the ratio is that of the row below.",
        "F6: all peaks are twice the paper's (3,169) and more, and its reason is not known: the paper's are steady"
        " at that rate.",
    ),
    **layer_notes.REASONS,
    "flying-70b-priority": (
        "F7: in the paper 3 to 5 requests a second are more than static TP can serve, and it queues for 2.1 s; our"
        " TP8 keeps up with them (mean TTFT 173 ms), so there is no collapse to avoid, and static TP is the better"
        " choice for everybody.",
        "With one urgent request in five, PengServe has a tp group of half the GPUs all the time (two of them half"
        " of the time) and never one of all: urgent requests are fast, and the others are about as fast as under DP.",
        "TTFT is above the paper's 63 to 166 ms in all policies: why is not known; prompts are 2,064 tokens on"
        " average, and steps of other requests' prompts are waited for.",
    ),
}
