"""Writes the Grafana dashboards from `panels.py`: `python -m dashboards.build`, from the root of the repository."""

import json
import re
from pathlib import Path
from typing import Any

from dashboards.panels import ROWS, Panel, Query
from pengserve.cluster.metrics.catalog import CATALOG
from pengserve.cluster.metrics.vllm_metrics import VllmMetric

FOLDER = Path(__file__).parent
BACKENDS = {"prometheus": "pengserve.json", "ray": "pengserve-ray.json"}
"""Metrics backend and its file."""

_METRIC = re.compile(r"\b(pengserve_\w+|vllm:\w+)")
_MATCHERS = {
    "$where": 'app=~"$app",instance_id=~"$instance"',
    "$app": 'app=~"$app"',
    "$vllm": 'model_name=~"$model"',
}
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_PANEL_HEIGHT = 8
_GRID_WIDTH = 24


def metrics_in(promql: str) -> set[str]:
    """Names of PengServe's and vLLM's metrics in an expression, without the suffixes of a histogram's series."""
    return {re.sub(r"_(bucket|sum|count)$", "", match.group()) for match in _METRIC.finditer(promql)}


def undeclared(vllm_metrics: tuple[VllmMetric, ...]) -> set[str]:
    """Metrics that a panel charts and neither the catalog nor vLLM declares; must be empty."""
    known = CATALOG.keys() | {metric.name for metric in vllm_metrics}
    charted = {name for row in ROWS for panel in row.panels for q in panel.queries for name in metrics_in(q.promql)}
    return charted - known


def expression(promql: str, backend: str) -> str:
    """The expression with label matchers filled in and names as `backend` exports them."""
    for short, matchers in _MATCHERS.items():
        promql = promql.replace("{" + short + "}", "{" + matchers + "}")
    if backend == "ray":
        return _METRIC.sub(lambda match: "ray_" + match.group().replace(":", "_"), promql)
    return promql


def dashboard(backend: str) -> dict[str, Any]:
    """Grafana's JSON model of the whole dashboard for a metrics backend, `prometheus` or `ray`."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        panels.append({"type": "row", "title": row.title, "collapsed": False, "panels": [], "id": len(panels) + 1}
                      | {"gridPos": {"h": 1, "w": _GRID_WIDTH, "x": 0, "y": y}})  # fmt: skip
        x, y = 0, y + 1
        for panel in row.panels:
            if x + panel.width > _GRID_WIDTH:
                x, y = 0, y + _PANEL_HEIGHT
            grid = {"h": _PANEL_HEIGHT, "w": panel.width, "x": x, "y": y}
            panels.append(_panel(panel, backend) | {"id": len(panels) + 1, "gridPos": grid})
            x += panel.width
        y += _PANEL_HEIGHT
    return {
        "uid": "pengserve" if backend == "prometheus" else "pengserve-ray",
        "title": "PengServe" if backend == "prometheus" else "PengServe (through Ray)",
        "tags": ["pengserve", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables(backend)},
        "panels": panels,
    }


def render(backend: str) -> str:
    """The dashboard as the text of its file."""
    return json.dumps(dashboard(backend), indent=1) + "\n"


def _panel(panel: Panel, backend: str) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [_target(query, backend, index) for index, query in enumerate(panel.queries)],
    }


def _target(query: Query, backend: str, index: int) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "expr": expression(query.promql, backend),
        "legendFormat": query.legend,
    }


def _variables(backend: str) -> list[dict[str, Any]]:
    up = expression("pengserve_instance_up", backend)
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1},
        _labels("app", "Application", f"label_values({up}, app)"),
        _labels("instance", "Instance", f'label_values({up}{{app=~"$app"}}, instance_id)'),
        _labels("model", "Model", f"label_values({expression('vllm:num_requests_running', backend)}, model_name)"),
    ]


def _labels(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 3,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def main() -> None:
    """Writes both files."""
    for backend, name in BACKENDS.items():
        (FOLDER / name).write_text(render(backend), encoding="utf-8")


if __name__ == "__main__":
    main()
