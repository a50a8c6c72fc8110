"""The dashboard's rows and panels as values: titles, PromQL, units. `build.py` turns them into Grafana's JSON.

Expressions name metrics as a scrape of `/metrics` does; `build.py` rewrites the names for Ray's agents. `$where` stands
for PengServe's label matchers (application, instance) and `$vllm` for those of vLLM's metrics.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One curve family of a panel."""

    promql: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart. `unit` is Grafana's name of a unit."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    help: str = ""
    kind: str = "timeseries"  # or "stat"
    width: int = 8  # of 24 columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A titled band of panels."""

    title: str
    panels: tuple[Panel, ...]


def _quantile(q: float, metric: str, matchers: str, labels: str = "le", legend: str = "") -> Query:
    promql = f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{{{matchers}}}[$__rate_interval])))"
    return Query(promql=promql, legend=f"p{round(q * 100)}{legend}")


def _quantiles(metric: str, matchers: str = "$vllm") -> tuple[Query, ...]:
    return tuple(_quantile(q, metric, matchers) for q in (0.5, 0.9, 0.99))


def _quantiles_by(label: str, metric: str, matchers: str, legend: str) -> tuple[Query, ...]:
    """Apart for each value of a label."""
    return tuple(_quantile(q, metric, matchers, f"le, {label}", f" {legend}") for q in (0.5, 0.99))


def _rates(counter: str, by: str) -> Query:
    """How fast a counter grows, apart for each value of a label."""
    return Query(promql=f"sum by ({by}) (rate({counter}{{$app}}[$__rate_interval]))", legend=f"{{{{{by}}}}}")


def _rate_of_all(counter: str, legend: str) -> Query:
    """How fast a counter of instances grows, over all of them."""
    return Query(promql=f"sum(max by (instance_id) (rate({counter}{{$where}}[$__rate_interval])))", legend=legend)


def _per_instance(expression: str) -> tuple[Query, ...]:
    """Every ingress reports each instance; one of them is enough."""
    return (Query(promql=f"max by (instance_id) ({expression})", legend="instance {{instance_id}}"),)


def _share(counter: str, outcome: str, by: str, legend: str) -> Query:
    """Share of what a counter counts that had an outcome, apart for each value of labels."""
    part, whole = (
        f"sum by ({by}) (rate({counter}{{$app{extra}}}[$__rate_interval]))" for extra in (f', outcome="{outcome}"', "")
    )
    return Query(promql=f"{part} / {whole}", legend=legend)


def _attained(counter: str, by: str, legend: str) -> Query:
    return _share(counter, "kept", by, legend)


_SLO = Row(
    title="Attainment by class",
    panels=(
        Panel(
            title="Answers within their SLO",
            unit="percentunit",
            help="Of requests with an SLO: first token, mean and 99th percentile of the time between tokens.",
            queries=(
                _attained("pengserve_slo_requests_total", "service_class, latency", "{{service_class}} {{latency}}"),
            ),
            width=8,
        ),
        Panel(
            title="Tokens within the time between tokens",
            unit="percentunit",
            queries=(_attained("pengserve_slo_tokens_total", "service_class", "{{service_class}}"),),
            width=8,
        ),
        Panel(
            title="Answers as long as predicted",
            unit="percentunit",
            help="Three quarters should reach the low bound, and half the median.",
            queries=(
                _share(
                    "pengserve_length_predictions_total",
                    "reached",
                    "service_class, bound",
                    "{{service_class}} {{bound}}",
                ),
            ),
        ),
    ),
)

_TENANTS = Row(
    title="Tenants",
    panels=(
        Panel(
            title="Requests that wait",
            queries=(
                Query(
                    promql='sum by (tenant, service_class) (pengserve_tenant_requests{$app, state="waiting"})',
                    legend="{{tenant}} {{service_class}}",
                ),
            ),
        ),
        Panel(
            title="Requests that run",
            queries=(
                Query(
                    promql='sum by (tenant, service_class) (pengserve_tenant_requests{$app, state="running"})',
                    legend="{{tenant}} {{service_class}}",
                ),
            ),
        ),
        Panel(
            title="Share of the tokens served",
            unit="percentunit",
            help="Computed tokens of prompts and answers, counted when an answer ends.",
            queries=(
                Query(
                    promql="sum by (tenant, service_class) (rate(pengserve_tenant_tokens_total{$app}[5m]))"
                    " / ignoring(tenant, service_class) group_left sum(rate(pengserve_tenant_tokens_total{$app}[5m]))",
                    legend="{{tenant}} {{service_class}}",
                ),
            ),
        ),
        Panel(
            title="Answers within their SLO",
            unit="percentunit",
            help="Of requests with an SLO: first token, and 99th percentile of the time between tokens.",
            queries=(
                _attained(
                    "pengserve_tenant_slo_requests_total", "tenant, service_class", "{{tenant}} {{service_class}}"
                ),
            ),
        ),
        Panel(
            title="Places that requests lost",
            unit="ops",
            help="Parked with their KV, or preempted and computed again; counted when an answer ends.",
            queries=(
                Query(
                    promql="sum by (tenant, service_class, kind)"
                    " (rate(pengserve_tenant_preemptions_total{$app}[$__rate_interval]))",
                    legend="{{tenant}} {{service_class}} {{kind}}",
                ),
            ),
        ),
        Panel(
            title="KV swapped",
            unit="Bps",
            help="Copied between device and host for requests that were parked; counted when an answer ends.",
            queries=(
                Query(
                    promql="sum by (tenant, service_class)"
                    " (rate(pengserve_tenant_swapped_bytes_total{$app}[$__rate_interval]))",
                    legend="{{tenant}} {{service_class}}",
                ),
            ),
        ),
    ),
)

_TRAFFIC = Row(
    title="Traffic and latency",
    panels=(
        Panel(
            title="Requests that ended",
            unit="reqps",
            queries=(_rates("pengserve_requests_total", "outcome"),),
        ),
        Panel(
            title="Requests open",
            queries=(Query(promql="sum(pengserve_requests_running{$app})", legend="open"),),
        ),
        Panel(
            title="Tokens",
            unit="ops",
            queries=(
                Query(promql="sum(rate(vllm:generation_tokens_total{$vllm}[$__rate_interval]))", legend="generated"),
                Query(promql="sum(rate(vllm:prompt_tokens_total{$vllm}[$__rate_interval]))", legend="prompt"),
            ),
        ),
        Panel(title="Time to first token", unit="s", queries=_quantiles("vllm:time_to_first_token_seconds")),
        Panel(title="Inter-token latency", unit="s", queries=_quantiles("vllm:inter_token_latency_seconds")),
        Panel(title="End-to-end latency", unit="s", queries=_quantiles("vllm:e2e_request_latency_seconds")),
        Panel(title="Time in the queue", unit="s", queries=_quantiles("vllm:request_queue_time_seconds")),
        Panel(
            title="Requests refused",
            unit="reqps",
            queries=(_rates("pengserve_rejected_total", "reason"),),
        ),
        Panel(
            title="Requests resumed elsewhere",
            unit="reqps",
            help="Requests that went on after their instance died or drained; clients notice a pause at most.",
            queries=(
                _rates("pengserve_requests_resumed_total", "reason"),
                Query(
                    promql="sum(rate(pengserve_resumed_output_tokens_total{$app}[$__rate_interval]))",
                    legend="tokens carried",
                ),
            ),
        ),
        Panel(
            title="Pause of a resumed request",
            unit="s",
            queries=_quantiles("pengserve_resume_seconds", "$app"),
        ),
        Panel(
            title="Requests moved by switches",
            unit="reqps",
            help="Carried ones went on with their KV; redirected ones were sent again.",
            queries=(_rates("pengserve_requests_moved_total", "kind"),),
        ),
        Panel(
            title="Gap in a stream that a switch moved",
            unit="s",
            queries=_quantiles("pengserve_switch_gap_seconds", "$app"),
        ),
    ),
)

_MEMORY = Row(
    title="Memory",
    panels=(
        Panel(
            title="Virtual KV load",
            unit="percentunit",
            help="Resident KV plus what the queue will need, over all blocks. Above 100 % an instance is overloaded.",
            queries=_per_instance("pengserve_virtual_kv_load{$where}"),
        ),
        Panel(
            title="KV blocks in use",
            unit="percentunit",
            queries=_per_instance(
                "pengserve_instance_kv_blocks_used{$where} / (pengserve_instance_kv_blocks{$where} > 0)"
            ),
        ),
        Panel(
            title="Prefix cache hit ratio",
            unit="percentunit",
            help="Prompt tokens found in the prefix cache, over all that were looked up.",
            queries=_per_instance(
                "rate(pengserve_instance_prefix_hit_tokens_total{$where}[$__rate_interval])"
                " / (rate(pengserve_instance_prefix_query_tokens_total{$where}[$__rate_interval]) > 0)"
            ),
        ),
        Panel(
            title="Prefix tokens found and predicted",
            unit="short",
            help="Prompt tokens found in the prefix caches each second, and those that dispatch expected there.",
            queries=(
                _rate_of_all("pengserve_instance_prefix_hit_tokens_total", "found"),
                _rate_of_all("pengserve_instance_prefix_predicted_tokens_total", "predicted"),
            ),
        ),
        Panel(
            title="KV cache, weights, process",
            unit="bytes",
            queries=(
                Query(promql="sum(max by (instance_id) (pengserve_instance_kv_bytes{$where}))", legend="KV cache"),
                Query(promql="sum(max by (instance_id) (pengserve_instance_weight_bytes{$where}))", legend="weights"),
                Query(promql="sum(max by (instance_id) (pengserve_instance_rss_bytes{$where}))", legend="processes"),
            ),
        ),
        Panel(
            title="Preemptions",
            unit="ops",
            queries=_per_instance("rate(pengserve_instance_preemptions_total{$where}[$__rate_interval])"),
        ),
        Panel(
            title="KV usage as vLLM reports it",
            unit="percentunit",
            queries=(Query(promql="max by (engine) (vllm:kv_cache_usage_perc{$vllm})", legend="engine {{engine}}"),),
        ),
    ),
)

_TIERS = Row(
    title="Tiers and copies",
    panels=(
        Panel(
            title="KV on device and host",
            unit="percentunit",
            help="Instances with a host tier: memory that holds KV, over all of it.",
            queries=(
                Query(
                    promql="max by (instance_id) (pengserve_instance_device_blocks_used{$where}"
                    " / (pengserve_instance_device_blocks{$where} > 0))",
                    legend="device {{instance_id}}",
                ),
                Query(
                    promql="max by (instance_id) (pengserve_instance_host_blocks_used{$where}"
                    " / (pengserve_instance_host_blocks{$where} > 0))",
                    legend="host {{instance_id}}",
                ),
            ),
        ),
        Panel(
            title="KV copied between device and host",
            unit="Bps",
            help="none/reuse: KV that left the device without a copy, because the host had one.",
            queries=(
                Query(
                    promql="sum by (direction, reason) (max by (instance_id, direction, reason)"
                    " (rate(pengserve_instance_tier_bytes_total{$where}[$__rate_interval])))",
                    legend="{{direction}} {{reason}}",
                ),
            ),
        ),
        Panel(
            title="Waiting for copies",
            unit="percentunit",
            help="Share of the time in which layers of a step waited for their KV from the host.",
            queries=_per_instance("rate(pengserve_instance_copy_wait_seconds_total{$where}[$__rate_interval])"),
        ),
        Panel(
            title="Parked requests",
            help="They wait with their KV kept until the device has room.",
            queries=(
                *_per_instance("pengserve_instance_requests_parked{$where}"),
                Query(
                    promql="sum(max by (instance_id) (rate(pengserve_instance_parks_total{$where}[$__rate_interval])))",
                    legend="parked per second",
                ),
                Query(
                    promql="sum(max by (instance_id)"
                    " (rate(pengserve_instance_displaced_total{$where}[$__rate_interval])))",
                    legend="for more urgent ones",
                ),
            ),
        ),
        Panel(
            title="Prefix hits on the host",
            unit="ops",
            queries=_per_instance("rate(pengserve_instance_host_hit_tokens_total{$where}[$__rate_interval])"),
        ),
    ),
)

_DECISIONS = Row(
    title="Decisions",
    panels=(
        Panel(
            title="Decisions",
            help="What was chosen, each time that it was another choice than before.",
            queries=(
                Query(
                    promql="max by (action) (increase(pengserve_decisions_total{$app}[$__rate_interval]))",
                    legend="{{action}}",
                ),
            ),
        ),
        Panel(
            title="Time to first token: predicted and measured",
            unit="s",
            help="Of the newest decision whose horizon is over.",
            queries=(Query(promql="max by (figure) (pengserve_decision_ttft_seconds{$app})", legend="{{figure}}"),),
        ),
        Panel(
            title="Measured over predicted, p50 and p90",
            help="1: what requests waited is what was predicted. Far from 1 for long: predictions are wrong here.",
            queries=tuple(_quantile(q, "pengserve_prediction_error_ratio", "$app") for q in (0.5, 0.9)),
        ),
    ),
)

_VLLM = Row(
    title="vLLM's own",
    panels=(
        Panel(
            title="Tokens in a step, p50 and p99",
            queries=tuple(_quantile(q, "vllm:iteration_tokens_total", "$vllm") for q in (0.5, 0.99)),
        ),
        Panel(
            title="Prompt and answer, p50",
            help="Tokens of a request.",
            queries=(
                _quantile(0.5, "vllm:request_prompt_tokens", "$vllm", legend=" prompt"),
                _quantile(0.5, "vllm:request_generation_tokens", "$vllm", legend=" answer"),
            ),
        ),
        Panel(
            title="Prefill and decode, p50",
            unit="s",
            queries=(
                _quantile(0.5, "vllm:request_prefill_time_seconds", "$vllm", legend=" prefill"),
                _quantile(0.5, "vllm:request_decode_time_seconds", "$vllm", legend=" decode"),
            ),
        ),
        Panel(
            title="Answers by why they ended",
            unit="reqps",
            queries=(
                Query(
                    promql="sum by (finished_reason) (rate(vllm:request_success_total{$vllm}[$__rate_interval]))",
                    legend="{{finished_reason}}",
                ),
            ),
        ),
    ),
)

_INSTANCES = Row(
    title="Instances",
    panels=(
        Panel(
            title="Running requests",
            queries=_per_instance("pengserve_instance_requests_running{$where}"),
        ),
        Panel(title="Queue", queries=_per_instance("pengserve_instance_queue_length{$where}")),
        Panel(
            title="Dispatched",
            unit="reqps",
            queries=(
                Query(
                    promql="sum by (instance_id) (rate(pengserve_dispatch_total{$where}[$__rate_interval]))",
                    legend="instance {{instance_id}}",
                ),
            ),
        ),
        Panel(
            title="Step time p50 and p99",
            unit="s",
            queries=_quantiles_by(
                "instance_id", "pengserve_instance_step_seconds", "$where", "instance {{instance_id}}"
            ),
        ),
        Panel(
            title="Tokens generated",
            unit="ops",
            queries=_per_instance("rate(pengserve_instance_generated_tokens_total{$where}[$__rate_interval])"),
        ),
        Panel(
            title="Prompt tokens",
            unit="ops",
            queries=_per_instance("rate(pengserve_instance_prompt_tokens_total{$where}[$__rate_interval])"),
        ),
        Panel(
            title="Requests waiting, by reason",
            queries=(
                Query(promql="sum by (reason) (vllm:num_requests_waiting_by_reason{$vllm})", legend="{{reason}}"),
            ),
        ),
        Panel(
            title="Prompts read in another order",
            help="Times, by rule: band (a more urgent one), length (a short one), lateness, memory (a long answer gave"
            " way), first_step (a short step).",
            queries=(
                Query(
                    promql="sum by (rule) (rate(pengserve_instance_departures_total{$where}[$__rate_interval]))",
                    legend="{{rule}}",
                ),
            ),
        ),
        Panel(
            title="Taken over from others",
            queries=_per_instance("increase(pengserve_instance_resumed_total{$where}[$__rate_interval])"),
        ),
    ),
)

_SHAPE = Row(
    title="Layout",
    panels=(
        Panel(
            title="Groups by shape",
            help="dp is an instance alone; tp2 two instances that share each request's work.",
            queries=(Query(promql="max by (shape) (pengserve_groups{$app})", legend="{{shape}}"),),
        ),
        Panel(
            title="Size of each instance's group",
            queries=_per_instance("pengserve_instance_group_size{$where}"),
        ),
        Panel(
            title="Who decides",
            help="1: the planner, from the load. 0: an operator has pinned the layout.",
            queries=(Query(promql="max(pengserve_layout_is_auto{$app})", legend="planner"),),
        ),
        Panel(
            title="Switches",
            help="Every ingress counts all of them; one is enough.",
            queries=(
                Query(
                    promql="max by (kind, strategy, outcome) "
                    "(increase(pengserve_switches_total{$app}[$__rate_interval]))",
                    legend="{{kind}} {{strategy}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            title="Parts of a switch, p50 and p99",
            unit="s",
            queries=_quantiles_by("phase", "pengserve_switch_phase_seconds", "$app", "{{phase}}"),
        ),
        Panel(
            title="Requests on switches",
            queries=(
                Query(
                    promql="max by (outcome) (increase(pengserve_switch_requests_total{$app}[$__rate_interval]))",
                    legend="{{outcome}}",
                ),
            ),
        ),
        Panel(
            title="KV carried",
            unit="bytes",
            queries=(
                Query(
                    promql="max(increase(pengserve_switch_carried_bytes_total{$app}[$__rate_interval]))",
                    legend="carried",
                ),
            ),
        ),
        Panel(
            title="Bubbles of pipelines",
            unit="percentunit",
            help="The share of its time that a stage does not compute while its pipeline has work.",
            queries=_per_instance(
                "rate(pengserve_instance_stage_idle_seconds_total{$where}[$__rate_interval])"
                " / (rate(pengserve_instance_stage_idle_seconds_total{$where}[$__rate_interval])"
                " + rate(pengserve_instance_stage_busy_seconds_total{$where}[$__rate_interval]) > 0)"
            ),
        ),
        Panel(
            title="Paused requests",
            help="They wait in a lane that is not stepped, until their instance runs its shape again.",
            queries=_per_instance("pengserve_instance_requests_paused{$where}"),
        ),
    ),
)

_CLUSTER = Row(
    title="Cluster",
    panels=(
        Panel(
            title="Ready instances",
            kind="stat",
            width=4,
            queries=(Query(promql="sum(max by (instance_id) (pengserve_instance_up{$where}))", legend="ready"),),
        ),
        Panel(
            title="Controller",
            kind="stat",
            width=4,
            help="0: it does not answer. Serving goes on; nothing is replaced until it is back.",
            queries=(Query(promql="min(pengserve_controller_up{$app})", legend="up"),),
        ),
        Panel(
            title="Version",
            kind="stat",
            width=4,
            queries=(Query(promql="max by (version) (pengserve_build_info{$app})", legend="{{version}}"),),
        ),
        Panel(
            title="Instances by state",
            width=12,
            queries=(Query(promql="max by (state) (pengserve_instances{$app})", legend="{{state}}"),),
        ),
        Panel(
            title="Replacements",
            help="Lives of each slot after its first.",
            queries=_per_instance("pengserve_instance_incarnation{$where}"),
        ),
        Panel(
            title="Channels",
            queries=(
                Query(promql="sum(pengserve_links_up{$app})", legend="open"),
                Query(promql="sum(pengserve_routes{$app})", legend="routes"),
                Query(promql="sum(increase(pengserve_link_lost_total{$where}[$__rate_interval]))", legend="lost"),
            ),
        ),
        Panel(
            title="Controller term, routing version, layout epoch",
            queries=(
                Query(promql="max(pengserve_controller_term{$app})", legend="controller term"),
                Query(promql="max(pengserve_routing_version{$app})", legend="routing version"),
                Query(promql="max(pengserve_layout_epoch{$app})", legend="layout epoch"),
            ),
        ),
    ),
)

ROWS: tuple[Row, ...] = (_SLO, _TENANTS, _TRAFFIC, _SHAPE, _DECISIONS, _MEMORY, _TIERS, _INSTANCES, _VLLM, _CLUSTER)
