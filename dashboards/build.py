"""Writes the dashboards from `panels.py` and the alerts from `alerts.py`: `python -m dashboards.build`, from the root.

Needs the package grafana-foundation-sdk, whose builders know Grafana's model. What is written is shipped.
"""

import json
import re
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    GridPos,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from pengserve.cluster.metrics.catalog import CATALOG
from pengserve.cluster.metrics.vllm_metrics import VllmMetric
from pengserve.dashboards import BACKENDS, alerts
from pengserve.dashboards.panels import ROWS, Panel, Query

FOLDER = Path(__file__).parent
_METRIC = re.compile(r"\b(pengserve_\w+|vllm:\w+)")
_MATCHERS = {
    "$where": 'app=~"$app",instance_id=~"$instance"',
    "$app": 'app=~"$app"',
    "$vllm": 'model_name=~"$model"',
}
_SHORT = re.compile(r"\{(\$where|\$app|\$vllm)([,}])")
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_PANEL_HEIGHT = 8
_GRID_WIDTH = 24


def metrics_in(promql: str) -> set[str]:
    """Names of PengServe's and vLLM's metrics in an expression, without the suffixes of a histogram's series."""
    return {re.sub(r"_(bucket|sum|count)$", "", match.group()) for match in _METRIC.finditer(promql)}


def undeclared(vllm_metrics: tuple[VllmMetric, ...]) -> set[str]:
    """Metrics that a panel or an alert asks for and neither the catalog nor vLLM declares; must be empty."""
    known = CATALOG.keys() | {metric.name for metric in vllm_metrics}
    asked = [q.promql for row in ROWS for panel in row.panels for q in panel.queries]
    asked += [alert.promql for alert in alerts.ALERTS]
    return {name for promql in asked for name in metrics_in(promql)} - known


def expression(promql: str, backend: str) -> str:
    """The expression with label matchers filled in and names as `backend` exports them."""
    promql = _SHORT.sub(lambda match: "{" + _MATCHERS[match[1]] + match[2], promql)
    if backend == "ray":
        return _METRIC.sub(lambda match: "ray_" + match.group().replace(":", "_"), promql)
    return promql


def dashboard(backend: str) -> dict[str, Any]:
    """Grafana's JSON model of the whole dashboard for a metrics backend, `prometheus` or `ray`."""
    is_ray = backend == "ray"
    board = (
        grafana.Dashboard("PengServe (through Ray)" if is_ray else "PengServe")
        .uid("pengserve-ray" if is_ray else "pengserve")
        .tags(["pengserve", "vllm"])
        .editable()
        .refresh("10s")
        .time("now-30m", "now")
    )
    for variable in _variables(backend):
        board.with_variable(variable)
    number, y = 0, 0
    for row in ROWS:
        number += 1
        board.with_row(grafana.Row(row.title).id(number).grid_pos(GridPos(h=1, w=_GRID_WIDTH, x=0, y=y)))
        x, y = 0, y + 1
        for panel in row.panels:
            if x + panel.width > _GRID_WIDTH:
                x, y = 0, y + _PANEL_HEIGHT
            number += 1
            place = GridPos(h=_PANEL_HEIGHT, w=panel.width, x=x, y=y)
            board.with_panel(_panel(panel, backend).id(number).grid_pos(place))
            x += panel.width
        y += _PANEL_HEIGHT
    model: dict[str, Any] = json.loads(json.dumps(board.build(), cls=JSONEncoder))
    return model


def render(backend: str) -> str:
    """The dashboard as the text of its file."""
    return json.dumps(dashboard(backend), indent=1, sort_keys=True) + "\n"


def _panel(panel: Panel, backend: str) -> Any:
    made = stat.Panel() if panel.kind == "stat" else timeseries.Panel().line_width(1.5).fill_opacity(8)
    made.title(panel.title).description(panel.help).datasource(_SOURCE).unit(panel.unit).min(0)
    for index, query in enumerate(panel.queries):
        made.with_target(_target(query, backend, index))
    return made


def _target(query: Query, backend: str, index: int) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .datasource(_SOURCE)
        .ref_id(chr(ord("A") + index))
        .expr(expression(query.promql, backend))
        .legend_format(query.legend)
    )


def _variables(backend: str) -> list[Any]:
    up = expression("pengserve_instance_up", backend)
    model = expression("vllm:num_requests_running", backend)
    return [
        grafana.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        _labels("app", "Application", f"label_values({up}, app)"),
        _labels("instance", "Instance", f'label_values({up}{{app=~"$app"}}, instance_id)'),
        _labels("model", "Model", f"label_values({model}, model_name)"),
    ]


def _labels(name: str, label: str, query: str) -> grafana.QueryVariable:
    return (
        grafana.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query({"query": query, "refId": name})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.NUMERICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all"))
    )


def main() -> None:
    """Writes all files."""
    for backend, name in BACKENDS.items():
        (FOLDER / name).write_text(render(backend), encoding="utf-8")
    (FOLDER / alerts.FILE).write_text(alerts.render(), encoding="utf-8")


if __name__ == "__main__":
    main()
