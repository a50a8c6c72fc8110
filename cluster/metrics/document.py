"""Writes `docs/metrics.md` from the catalog: `python -m pengserve.cluster.metrics.document > docs/metrics.md`."""

import sys
from collections.abc import Iterable, Sequence

from pengserve.cluster.metrics.catalog import CATALOG, MetricArea, MetricKind, MetricSpec
from pengserve.cluster.metrics.vllm_metrics import VllmMetric, read_vllm_metrics, vllm_version

_HEAD = """# Metrics

Made from the code by `python -m pengserve.cluster.metrics.document`; a test compares it with the code and with a live
scrape.

- `metrics.backend: prometheus`: scrape `GET /metrics` of the application. It has PengServe's metrics, vLLM's and those
  of the process, with the names below.
- `metrics.backend: ray`: scrape Ray's metric agents (`prom_metrics_service_discovery.json` in Ray's session folder).
  Names have the prefix `ray_`; in vLLM's names `:` becomes `_`.
- `metrics.backend: auto`: `ray` on several nodes or with several ingress replicas, else `prometheus`.

With `prometheus` and several ingress replicas a scrape through the proxy reaches one of them, and counters seem to
jump: use `ray` there. Dashboards for both: [dashboards](../dashboards/README.md).

Every PengServe metric has the label `app`. `instance_id` is the slot of an instance; a replacement takes over the
series of the dead one. With several ingress replicas, each reports what it sees: take `max by (instance_id)` of
instance metrics, `max` of those of the shape, and `sum` of the traffic ones.
"""

_VLLM_HEAD = """## vLLM's own

vLLM {version} runs in each instance and reports through the ingress; `engine` is the instance's slot. These are all
that its Prometheus logger declares; a condition says when one exists (vLLM's own words). Its options (KV connectors,
offloading, speculative decoding, tool parsers) add more. As in vLLM's own server, a request with `n: 4` counts as four
requests with four prompts here, and once in `vllm:request_params_n`.
"""


def document(vllm_metrics: Sequence[VllmMetric] | None, version: str | None) -> str:
    """The whole of `docs/metrics.md`. Without vLLM (None) its section says so."""
    parts = [_HEAD]
    for area in MetricArea:
        specs = [spec for spec in CATALOG.values() if spec.area is area]
        parts.append(f"## {area.value}\n\n" + _table(("metric", "kind", "unit", "labels", "meaning"), map(_row, specs)))
    if vllm_metrics is None:
        parts.append("## vLLM's own\n\nvLLM was not installed where this was made.\n")
    else:
        table = _table(("metric", "kind", "labels", "meaning", "only if"), map(_vllm_row, vllm_metrics))
        parts.append(_VLLM_HEAD.format(version=version) + "\n" + table)
    return "\n".join(parts)


def documented_names(text: str) -> set[str]:
    """Names of all metrics in a document made by `document`."""
    return {line.split("`")[1] for line in text.splitlines() if line.startswith("| `") and "_" in line.split("`")[1]}


def _row(spec: MetricSpec) -> tuple[str, ...]:
    meaning = spec.help
    if spec.kind is MetricKind.HISTOGRAM:
        meaning += f" Buckets: {', '.join(f'{bound:g}' for bound in spec.buckets)}."
    return f"`{spec.name}`", spec.kind.value, spec.unit, _code(spec.labels), meaning


def _vllm_row(metric: VllmMetric) -> tuple[str, ...]:
    labels = tuple(label for label in metric.labels if label not in ("model_name", "engine"))
    condition = f"`{metric.condition}`" if metric.condition else ""
    return f"`{metric.name}`", metric.kind.value, _code(labels), metric.help, condition


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

    return line(head) + "|" + "---|" * len(head) + "\n" + "".join(line(row) for row in rows)


def main() -> None:
    """Prints the document."""
    sys.stdout.write(document(read_vllm_metrics(), vllm_version()))


if __name__ == "__main__":
    main()
