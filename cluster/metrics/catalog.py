"""Every metric PengServe exports, declared once. Documentation, dashboards and tests are made from this list.

A spec's `name` is the name in a Prometheus scrape of the ingress. Through Ray the same metric is `ray_` + `name`.
Every metric carries the label `app`. The slot of an instance is the label `instance_id`: Prometheus itself owns
`instance` and would rename ours.
"""

from dataclasses import dataclass
from enum import StrEnum

APP_LABEL = "app"
"""Label of every metric: the application's name."""


class MetricKind(StrEnum):
    """How a metric moves."""

    COUNTER = "counter"  # only grows; its name ends in `_total`
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricArea(StrEnum):
    """What a metric is about; sections of the document and rows of the dashboard."""

    TRAFFIC = "Traffic"
    INSTANCES = "Instances"
    MEMORY = "Memory"
    SHAPE = "Shape"
    CLUSTER = "Cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric: name, kind, unit, labels beside `app`, and what it means."""

    name: str
    kind: MetricKind
    area: MetricArea
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, ascending

    def __post_init__(self) -> None:
        if not self.name.startswith("pengserve_") or ":" in self.name:
            raise ValueError(f"{self.name} must begin with pengserve_ and have no colon")
        if (self.kind is MetricKind.COUNTER) != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: counters, and only they, end in _total")
        if (self.kind is MetricKind.HISTOGRAM) != bool(self.buckets):
            raise ValueError(f"{self.name}: histograms, and only they, have buckets")
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"{self.name}: buckets must ascend")

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Label names in the order that values are given: `app` first."""
        return (APP_LABEL, *self.labels)


CATALOG: dict[str, MetricSpec] = {}
"""All specs by name, in the order of declaration."""


def _declare(spec: MetricSpec) -> MetricSpec:
    if spec.name in CATALOG:
        raise ValueError(f"{spec.name} is declared twice")
    CATALOG[spec.name] = spec
    return spec


def _counter(name: str, area: MetricArea, unit: str, text: str, *labels: str) -> MetricSpec:
    return _declare(
        MetricSpec(name=name, kind=MetricKind.COUNTER, area=area, unit=unit, help=text, labels=tuple(labels))
    )


def _gauge(name: str, area: MetricArea, unit: str, text: str, *labels: str) -> MetricSpec:
    return _declare(MetricSpec(name=name, kind=MetricKind.GAUGE, area=area, unit=unit, help=text, labels=tuple(labels)))


def _histogram(
    name: str, area: MetricArea, unit: str, text: str, *labels: str, buckets: tuple[float, ...]
) -> MetricSpec:
    return _declare(
        MetricSpec(
            name=name, kind=MetricKind.HISTOGRAM, area=area, unit=unit, help=text, labels=tuple(labels), buckets=buckets
        )
    )


# One engine step takes from under a millisecond (tiny model) to a few seconds (long prefill).
_STEP_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
# From the loss of an instance until the stream goes on: milliseconds, or as long as a replacement takes to load.
_RESUME_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# A part of a switch: milliseconds, or as long as running requests take to end (sequential, soft).
_SWITCH_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

# Measured over predicted: half, as much, twice.
_ERROR_BUCKETS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.11, 1.25, 1.5, 2.0, 4.0, 8.0)

_TRAFFIC, _INSTANCES = MetricArea.TRAFFIC, MetricArea.INSTANCES
_MEMORY, _SHAPE, _CLUSTER = MetricArea.MEMORY, MetricArea.SHAPE, MetricArea.CLUSTER

# Traffic: what clients ask of the ingress and what becomes of it.
REQUESTS = _counter(
    "pengserve_requests_total",
    _TRAFFIC,
    "requests",
    "Requests that ended, by outcome: `ok` (finished by itself), `aborted` (the client went away), `failed`.",
    "outcome",
)
REQUESTS_RUNNING = _gauge(
    "pengserve_requests_running", _TRAFFIC, "requests", "Requests this ingress holds open, queued ones included."
)
REJECTED = _counter(
    "pengserve_rejected_total",
    _TRAFFIC,
    "requests",
    "Requests refused before they reached an instance, by reason: `auth`, `body_size`, `invalid`, `overload`, "
    "`no_instance`, `not_found`, `slo` (its first token was predicted too late), `tenant` (it has come to a limit).",
    "reason",
)
RESUMED = _counter(
    "pengserve_requests_resumed_total",
    _TRAFFIC,
    "requests",
    "Requests taken over by another instance and computed again there, by reason: `lost` (the instance died), `drained`"
    " (it was emptied, and they could not move with their KV).",
    "reason",
)
RESUMED_TOKENS = _counter(
    "pengserve_resumed_output_tokens_total",
    _TRAFFIC,
    "tokens",
    "Output tokens that resumed requests already had; the new instance computes their KV again.",
)
RESUME_SECONDS = _histogram(
    "pengserve_resume_seconds",
    _TRAFFIC,
    "seconds",
    "From the loss of a request's instance to the next token from another one.",
    buckets=_RESUME_BUCKETS_S,
)
MOVED = _counter(
    "pengserve_requests_moved_total",
    _TRAFFIC,
    "requests",
    "Requests that went on at another instance, by kind: `carried` (their KV went along), `redirected` (sent again, "
    "without KV).",
    "kind",
)
SWITCH_GAP_SECONDS = _histogram(
    "pengserve_switch_gap_seconds",
    _TRAFFIC,
    "seconds",
    "From a stream's last token before a switch moved it to its next one.",
    buckets=_RESUME_BUCKETS_S,
)
DISPATCHED = _counter(
    "pengserve_dispatch_total", _TRAFFIC, "requests", "Requests sent to an instance, those sent again included.",
    "instance_id",
)  # fmt: skip

SLO_REQUESTS = _counter(
    "pengserve_slo_requests_total",
    _TRAFFIC,
    "requests",
    "Answers of requests with an SLO, by class, latency and outcome (`kept`, `missed`). Latencies: `ttft`, `tpot` "
    "(mean time between tokens), `tbt` (its 99th percentile). Requests whose client left are not counted.",
    "service_class",
    "latency",
    "outcome",
)
SLO_TOKENS = _counter(
    "pengserve_slo_tokens_total",
    _TRAFFIC,
    "tokens",
    "Tokens after the first of requests with an SLO for the time between tokens, by class and outcome (`kept`, "
    "`missed`).",
    "service_class",
    "outcome",
)

LENGTH_PREDICTIONS = _counter(
    "pengserve_length_predictions_total",
    _TRAFFIC,
    "answers",
    "Answers of requests with an SLO, by whether they had at least as many tokens as was predicted (`reached`) or not "
    "(`below`), for the conservative bound (`low`, 75 % should reach it) and the `median`.",
    "service_class",
    "bound",
    "outcome",
)

TENANT_REQUESTS = _gauge(
    "pengserve_tenant_requests",
    _TRAFFIC,
    "requests",
    "Requests in flight by tenant, class and state: `waiting` for their first token, `running`. The 32 pairs of a "
    "tenant and a class that came first have their own series, all others `*`. Requests without a tenant are `none`'s.",
    "tenant",
    "service_class",
    "state",
)
TENANT_TOKENS = _counter(
    "pengserve_tenant_tokens_total",
    _TRAFFIC,
    "tokens",
    "Tokens that were computed for requests that ended, by tenant and class: prompts without what was cached, and "
    "answers.",
    "tenant",
    "service_class",
)
TENANT_SLO_REQUESTS = _counter(
    "pengserve_tenant_slo_requests_total",
    _TRAFFIC,
    "requests",
    "Answers of requests with an SLO, by tenant, class and outcome: `kept` (TTFT and the 99th percentile of the time "
    "between tokens), `missed`. Requests whose client left are not counted.",
    "tenant",
    "service_class",
    "outcome",
)
TENANT_PREEMPTIONS = _counter(
    "pengserve_tenant_preemptions_total",
    _TRAFFIC,
    "preemptions",
    "Times that requests which ended had lost their places, by tenant, class and kind: `parked` (with their KV), "
    "`recomputed` (their KV was lost and computed again).",
    "tenant",
    "service_class",
    "kind",
)
TENANT_SWAPPED_BYTES = _counter(
    "pengserve_tenant_swapped_bytes_total",
    _TRAFFIC,
    "bytes",
    "KV of requests which ended that was copied between device and host while they were parked, by tenant and class. "
    "A copy of KV that requests share counts for the one that goes on first.",
    "tenant",
    "service_class",
)

# Instances: one series per slot. A replacement takes over the series of the dead one.
INSTANCE_UP = _gauge(
    "pengserve_instance_up", _INSTANCES, "0 or 1", "1 while the instance is ready for new requests.", "instance_id"
)
INSTANCE_INCARNATION = _gauge(
    "pengserve_instance_incarnation",
    _INSTANCES,
    "lives",
    "How often the slot was filled; each step up is one replacement.",
    "instance_id",
)
INSTANCE_RUNNING = _gauge(
    "pengserve_instance_requests_running",
    _INSTANCES,
    "requests",
    "Requests in the instance's running batch.",
    "instance_id",
)
INSTANCE_WAITING = _gauge(
    "pengserve_instance_queue_length",
    _INSTANCES,
    "requests",
    "Requests that wait in the instance's scheduler.",
    "instance_id",
)
INSTANCE_STEP_SECONDS = _histogram(
    "pengserve_instance_step_seconds",
    _INSTANCES,
    "seconds",
    "Duration of one engine step: schedule, run, sample.",
    "instance_id",
    buckets=_STEP_BUCKETS_S,
)
INSTANCE_PROMPT_TOKENS = _counter(
    "pengserve_instance_prompt_tokens_total", _INSTANCES, "tokens", "Prompt tokens computed.", "instance_id"
)
INSTANCE_GENERATED_TOKENS = _counter(
    "pengserve_instance_generated_tokens_total", _INSTANCES, "tokens", "Output tokens sampled.", "instance_id"
)
INSTANCE_PREEMPTIONS = _counter(
    "pengserve_instance_preemptions_total",
    _INSTANCES,
    "preemptions",
    "Running requests put back into the queue for want of KV blocks.",
    "instance_id",
)
INSTANCE_RESUMED = _counter(
    "pengserve_instance_resumed_total",
    _INSTANCES,
    "requests",
    "Half-decoded requests the instance took over from others.",
    "instance_id",
)
DEPARTURES = _counter(
    "pengserve_instance_departures_total",
    _INSTANCES,
    "times",
    "Times that requests were not served in the order in which they came, by rule: band, length, lateness, memory,"
    " first_step.",
    "instance_id",
    "rule",
)

# Memory: what each instance holds.
KV_BLOCKS_USED = _gauge(
    "pengserve_instance_kv_blocks_used", _MEMORY, "blocks", "KV blocks that running requests hold.", "instance_id"
)
KV_BLOCKS = _gauge(
    "pengserve_instance_kv_blocks", _MEMORY, "blocks", "KV blocks the instance has in all.", "instance_id"
)
DEVICE_BLOCKS = _gauge(
    "pengserve_instance_device_blocks",
    _MEMORY,
    "blocks",
    "KV blocks that the device holds in all layers, where the instance has a host tier; else 0.",
    "instance_id",
)
DEVICE_BLOCKS_USED = _gauge(
    "pengserve_instance_device_blocks_used",
    _MEMORY,
    "blocks",
    "Of those, the ones whose memory holds KV.",
    "instance_id",
)
HOST_BLOCKS = _gauge(
    "pengserve_instance_host_blocks", _MEMORY, "blocks", "KV blocks that the host tier holds in all.", "instance_id"
)
HOST_BLOCKS_USED = _gauge(
    "pengserve_instance_host_blocks_used", _MEMORY, "blocks", "Of those, the ones that hold KV.", "instance_id"
)
REQUESTS_PARKED = _gauge(
    "pengserve_instance_requests_parked",
    _MEMORY,
    "requests",
    "Requests that wait with their KV kept until the device has room.",
    "instance_id",
)
PARKS = _counter(
    "pengserve_instance_parks_total", _MEMORY, "requests", "Times that a request was parked.", "instance_id"
)
DISPLACED = _counter(
    "pengserve_instance_displaced_total",
    _MEMORY,
    "requests",
    "Of these, times that it was for a more urgent request, which took its place in the batch.",
    "instance_id",
)
HOST_HITS = _counter(
    "pengserve_instance_host_hit_tokens_total",
    _MEMORY,
    "tokens",
    "Prompt tokens found in the prefix cache whose KV was on the host.",
    "instance_id",
)
TIER_BYTES = _counter(
    "pengserve_instance_tier_bytes_total",
    _MEMORY,
    "bytes",
    "KV copied between device and host: to_device (stage: a step waits, bring: beside the steps), to_host (evict: its"
    " place is needed, behind: before it is), or none (reuse: the host had a copy).",
    "instance_id",
    "direction",
    "reason",
)
COPY_WAIT_SECONDS = _counter(
    "pengserve_instance_copy_wait_seconds_total",
    _MEMORY,
    "seconds",
    "Time that layers of a step waited for their KV from the host.",
    "instance_id",
)
KV_BYTES = _gauge(
    "pengserve_instance_kv_bytes", _MEMORY, "bytes", "Size of the instance's KV cache over all layers.", "instance_id"
)
WEIGHT_BYTES = _gauge(
    "pengserve_instance_weight_bytes", _MEMORY, "bytes", "Size of the model parameters it holds.", "instance_id"
)
RSS_BYTES = _gauge(
    "pengserve_instance_rss_bytes", _MEMORY, "bytes", "Resident memory of the instance's process.", "instance_id"
)
VIRTUAL_KV_LOAD = _gauge(
    "pengserve_virtual_kv_load",
    _MEMORY,
    "ratio",
    "Resident KV blocks plus those its queue will need, over all its blocks. Above 1 it is overloaded.",
    "instance_id",
)
PREFIX_QUERIES = _counter(
    "pengserve_instance_prefix_query_tokens_total",
    _MEMORY,
    "tokens",
    "Prompt tokens looked up in the prefix cache.",
    "instance_id",
)
PREFIX_HITS = _counter(
    "pengserve_instance_prefix_hit_tokens_total",
    _MEMORY,
    "tokens",
    "Prompt tokens found in the prefix cache.",
    "instance_id",
)
PREFIX_PREDICTED = _counter(
    "pengserve_instance_prefix_predicted_tokens_total",
    _MEMORY,
    "tokens",
    "Prompt tokens that ingresses expected in the prefix cache of the instance that they sent the request to.",
    "instance_id",
)

# Shape: how the instances are grouped, and the switches between shapes; every ingress counts all of them.
GROUPS = _gauge(
    "pengserve_groups", _SHAPE, "groups", "Groups of the layout, by shape: `dp`, `tp2`, `pp2`, ...", "shape"
)
GROUP_SIZE = _gauge(
    "pengserve_instance_group_size",
    _SHAPE,
    "instances",
    "Instances in the group of this one; 1 while it is alone.",
    "instance_id",
)
INSTANCE_PAUSED = _gauge(
    "pengserve_instance_requests_paused",
    _SHAPE,
    "requests",
    "Requests that wait in a lane that is not stepped, until their instance runs its shape again.",
    "instance_id",
)
STAGE_BUSY_SECONDS = _counter(
    "pengserve_instance_stage_busy_seconds_total",
    _SHAPE,
    "seconds",
    "Time that the instance's stage of a pipeline computed.",
    "instance_id",
)
STAGE_IDLE_SECONDS = _counter(
    "pengserve_instance_stage_idle_seconds_total",
    _SHAPE,
    "seconds",
    "Time between two microbatches in which the instance's stage of a pipeline did not compute while the pipeline had "
    "work. Its share of busy and idle time together is the bubble share.",
    "instance_id",
)
LAYOUT_AUTO = _gauge(
    "pengserve_layout_is_auto", _SHAPE, "0 or 1", "1 while the planner decides about the layout; 0 while it is pinned."
)
SWITCHES = _counter(
    "pengserve_switches_total",
    _SHAPE,
    "switches",
    "Switches that ended, by kind (`merge`, `split`, `drop`, `restore`), strategy, and outcome (`done`, `aborted`).",
    "kind",
    "strategy",
    "outcome",
)
SWITCH_PHASE_SECONDS = _histogram(
    "pengserve_switch_phase_seconds",
    _SHAPE,
    "seconds",
    "Parts of a switch: `prepare` (all members agree), `drain` (running requests end; sequential and soft), `meet` "
    "(all members reach a step boundary; the leader goes on in short steps), `cutover` (nothing steps).",
    "phase",
    buckets=_SWITCH_BUCKETS_S,
)
SWITCHED_REQUESTS = _counter(
    "pengserve_switch_requests_total",
    _SHAPE,
    "requests",
    "What switches did with running and waiting requests: `carried` (went on with their KV), `recomputed`, `paused`, "
    "`redirected` (waiting ones, sent elsewhere).",
    "outcome",
)
CARRIED_BYTES = _counter(
    "pengserve_switch_carried_bytes_total", _SHAPE, "bytes", "KV that switches sent from instance to instance."
)
DECISIONS = _counter(
    "pengserve_decisions_total",
    _SHAPE,
    "decisions",
    "New decisions, by what was chosen: `merge`, `split`, `drop`, `restore`, `migrate`, `keep`.",
    "action",
)
DECISION_TTFT = _gauge(
    "pengserve_decision_ttft_seconds",
    _SHAPE,
    "seconds",
    "Mean time to first token within the horizon of the newest decision that came to its end: `predicted`, `measured`.",
    "figure",
)
PREDICTION_ERROR = _histogram(
    "pengserve_prediction_error_ratio",
    _SHAPE,
    "ratio",
    "What requests waited within a decision's horizon, over what was predicted; 1 is a true prediction. Of layouts "
    "that were kept, only surprises.",
    buckets=_ERROR_BUCKETS,
)

# Cluster: the state of the application, as this ingress knows it.
BUILD_INFO = _gauge("pengserve_build_info", _CLUSTER, "1", "Always 1; the label tells the version.", "version")
INSTANCES = _gauge("pengserve_instances", _CLUSTER, "instances", "Instances by state.", "state")
ROUTES = _gauge("pengserve_routes", _CLUSTER, "routes", "Groups that requests can be sent to.")
CONTROLLER_TERM = _gauge(
    "pengserve_controller_term", _CLUSTER, "term", "Term of the controller that made the routing table in use."
)
ROUTING_VERSION = _gauge(
    "pengserve_routing_version",
    _CLUSTER,
    "version",
    "Routing table in use, counted within the controller's term.",
)
LAYOUT_EPOCH = _gauge("pengserve_layout_epoch", _CLUSTER, "epoch", "Epoch of the layout in use.")
CONTROLLER_UP = _gauge(
    "pengserve_controller_up", _CLUSTER, "0 or 1", "1 while the controller answers; serving goes on without it."
)
LINKS_UP = _gauge("pengserve_links_up", _CLUSTER, "links", "Open request channels to instances.")
LINK_LOST = _counter(
    "pengserve_link_lost_total", _CLUSTER, "links", "Request channels that broke unasked.", "instance_id"
)
