"""Prometheus alerts as values. `build.py` writes them into `alerts.yml`, for a Prometheus that scrapes `/metrics`."""

from dataclasses import dataclass

import yaml

FILE = "alerts.yml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule: when `promql` has been true for `minutes`, `text` says what it means and what to do."""

    name: str
    promql: str
    minutes: int
    severity: str  # "page": users are hurt now; "ticket": look today
    text: str


ALERTS = (
    Alert(
        name="PengServeNoInstance",
        promql="sum by (app) (pengserve_instance_up) == 0",
        minutes=1,
        severity="page",
        text="No instance is ready. `pengserve status` and `pengserve events` say why.",
    ),
    Alert(
        name="PengServeCrashLoop",
        promql="max by (app, instance_id) (delta(pengserve_instance_incarnation[15m])) > 3",
        minutes=0,
        severity="page",
        text="An instance dies again and again. `pengserve events` says of what; then look at its log.",
    ),
    Alert(
        name="PengServeControllerAway",
        promql="min by (app) (pengserve_controller_up) == 0",
        minutes=2,
        severity="page",
        text="The controller does not answer. Requests are served; dead instances are not replaced and shapes stay.",
    ),
    Alert(
        name="PengServeOverloaded",
        promql='sum by (app) (rate(pengserve_rejected_total{reason="overload"}[5m])) > 0',
        minutes=5,
        severity="ticket",
        text="More requests than slots and queue hold. Add instances, or raise `limits.max_queued_requests`.",
    ),
    Alert(
        name="PengServeRequestsFail",
        promql='sum by (app) (rate(pengserve_requests_total{outcome="failed"}[5m])) > 0',
        minutes=5,
        severity="page",
        text="Requests end with an error. `pengserve why ID` and the ingress's log say which and why.",
    ),
    Alert(
        name="PengServeMemoryShort",
        promql="max by (app, instance_id) (pengserve_virtual_kv_load) > 1",
        minutes=5,
        severity="ticket",
        text="KV memory is short and requests wait. Add instances or memory, or allow `shape.drop`.",
    ),
    Alert(
        name="PengServePreempts",
        promql="max by (app, instance_id) (rate(pengserve_instance_preemptions_total[5m])) > 0",
        minutes=10,
        severity="ticket",
        text="vLLM's scheduler computes requests again for want of KV. As for a shortage of memory.",
    ),
    Alert(
        name="PengServeHostTierFull",
        promql="max by (app, instance_id) (pengserve_instance_host_blocks_used"
        " / (pengserve_instance_host_blocks > 0)) > 0.95",
        minutes=10,
        severity="ticket",
        text="The host tier is full: prefixes are dropped and requests cannot be parked. Raise `memory.host_bytes`.",
    ),
    Alert(
        name="PengServeSwitchesFail",
        promql='max by (app) (increase(pengserve_switches_total{outcome="aborted"}[15m])) > 3',
        minutes=0,
        severity="ticket",
        text="Changes of shape fail. `transition_error` says why; `pengserve layout set dp` stops them meanwhile.",
    ),
    Alert(
        name="PengServePredictionsWrong",
        promql="abs(log2(histogram_quantile(0.5, sum by (app, le) ("
        "rate(pengserve_prediction_error_ratio_bucket[1h]))))) > 1",
        minutes=60,
        severity="ticket",
        text="Requests wait twice as long as decisions predict, or half. Run `pengserve profile` on this machine.",
    ),
    Alert(
        name="PengServeSloMissed",
        promql='sum by (app, service_class) (rate(pengserve_slo_requests_total{outcome="kept"}[10m]))'
        " / sum by (app, service_class) (rate(pengserve_slo_requests_total[10m])) < 0.9",
        minutes=10,
        severity="ticket",
        text="Of this class less than 90 % of latencies keep their SLO. `pengserve events --why` says what was tried.",
    ),
    Alert(
        name="PengServeLinksLost",
        promql="sum by (app) (increase(pengserve_link_lost_total[15m])) > 0",
        minutes=0,
        severity="ticket",
        text="Connections between ingress and instance broke: an instance died, or the network drops connections.",
    ),
    Alert(
        name="PengServeFirstTokenLate",
        promql="histogram_quantile(0.99, sum by (model_name, le) (rate(vllm:time_to_first_token_seconds_bucket[5m])))"
        " > 2",
        minutes=10,
        severity="ticket",
        text="Users wait for the first token. Choose the bound of this rule for your service.",
    ),
)


def render() -> str:
    """The rules as the text of their file."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.promql,
            "for": f"{alert.minutes}m",
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.text},
        }
        for alert in ALERTS
    ]
    head = (
        "# Written by `python -m dashboards.build` from alerts.py. Bounds are a start: choose those of your service.\n"
    )
    return head + yaml.safe_dump({"groups": [{"name": "pengserve", "rules": rules}]}, sort_keys=False, width=200)
