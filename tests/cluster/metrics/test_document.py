"""The document and the dashboards say what the code says."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pengserve.cluster.cli.main import main
from pengserve.cluster.metrics.catalog import CATALOG, MetricKind
from pengserve.cluster.metrics.document import document, documented_names
from pengserve.cluster.metrics.vllm_metrics import parse_metrics, read_vllm_metrics, vllm_version
from pengserve.dashboards import BACKENDS, alerts, build, push

ROOT = Path(__file__).parents[3]

ALERT_TESTS = """
rule_files: [RULES]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'pengserve_instance_up{app="a", instance_id="0"}', values: '1x3 0x60'}
      - {series: 'pengserve_instance_incarnation{app="a", instance_id="0"}', values: '1 2 3 4 5 6 7 8x60'}
      - {series: 'pengserve_instance_host_blocks{app="a", instance_id="0"}', values: '100x60'}
      - {series: 'pengserve_instance_host_blocks_used{app="a", instance_id="0"}', values: '99x60'}
      - {series: 'pengserve_controller_up{app="a"}', values: '1x60'}
    alert_rule_test:
      - {eval_time: 2m, alertname: PengServeNoInstance, exp_alerts: []}
      - {eval_time: 9m, alertname: PengServeControllerAway, exp_alerts: []}
      - eval_time: 9m
        alertname: PengServeNoInstance
        exp_alerts:
          - exp_labels: {app: a, severity: page}
            exp_annotations:
              summary: No instance is ready. `pengserve status` and `pengserve events` say why.
      - eval_time: 8m
        alertname: PengServeCrashLoop
        exp_alerts:
          - exp_labels: {app: a, instance_id: "0", severity: page}
            exp_annotations:
              summary: An instance dies again and again. `pengserve events` says of what; then look at its log.
      - {eval_time: 5m, alertname: PengServeHostTierFull, exp_alerts: []}
      - eval_time: 15m
        alertname: PengServeHostTierFull
        exp_alerts:
          - exp_labels: {app: a, instance_id: "0", severity: ticket}
            exp_annotations:
              summary: >-
                The host tier is full: prefixes are dropped and requests cannot be parked. Raise `memory.host_bytes`.
"""


def test_the_document_is_up_to_date() -> None:
    expected = document(read_vllm_metrics(), vllm_version())
    assert (ROOT / "docs" / "metrics.md").read_text() == expected, "run python -m pengserve.cluster.metrics.document"


def test_the_document_names_every_metric() -> None:
    vllm_metrics = read_vllm_metrics()
    assert vllm_metrics is not None
    names = documented_names(document(vllm_metrics, "x"))
    assert names == CATALOG.keys() | {metric.name for metric in vllm_metrics}


def test_vllm_declarations_are_read_with_labels_and_conditions() -> None:
    source = """
class Logger:
    def __init__(self):
        if self.config.fancy:
            c = self._counter_cls(name="vllm:tokens", documentation="Tokens " "read.", labelnames=labelnames + ["why"])
        g = self._gauge_cls(name="vllm:load", documentation="Load.", labelnames=labelnames)
"""
    counter, gauge = parse_metrics(source)
    assert (counter.name, counter.kind, counter.help) == ("vllm:tokens_total", MetricKind.COUNTER, "Tokens read.")
    assert counter.labels == ("model_name", "engine", "why")
    assert counter.condition == "config.fancy"
    assert (gauge.name, gauge.condition) == ("vllm:load", "")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_dashboard_is_up_to_date(backend: str) -> None:
    text = (ROOT / "dashboards" / BACKENDS[backend]).read_text()
    assert text == build.render(backend), "run python -m dashboards.build"


def test_every_charted_metric_is_declared() -> None:
    vllm_metrics = read_vllm_metrics()
    assert vllm_metrics is not None
    assert build.undeclared(vllm_metrics) == set()


def test_every_declared_metric_is_charted() -> None:
    text = (ROOT / "dashboards" / "pengserve.json").read_text()
    assert [name for name in CATALOG if name not in text] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_panels_do_not_overlap_and_have_unique_ids(backend: str) -> None:
    panels = build.dashboard(backend)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not taken & cells
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_expression_names_variables_in_matchers_alone(backend: str) -> None:
    for panel in build.dashboard(backend)["panels"]:
        for target in panel.get("targets", ()):
            bare = re.sub(r'=~"\$\w+"|\[\$__rate_interval\]', "", target["expr"])
            assert "$" not in bare, f"{panel['title']}: {target['expr']}"


def test_names_are_rewritten_for_ray() -> None:
    assert (
        build.expression("rate(vllm:a_total{$vllm}[1m])", "ray") == 'rate(ray_vllm_a_total{model_name=~"$model"}[1m])'
    )
    for panel in build.dashboard("ray")["panels"]:
        for target in panel.get("targets", ()):
            assert "vllm:" not in target["expr"]


def test_pushing_saves_each_dashboard() -> None:
    class Shelf:
        saved: list[dict[str, Any]] = []  # noqa: RUF012

        def save(self, model: dict[str, Any]) -> str:
            self.saved.append(json.loads(json.dumps(model)))
            return f"/d/{model['uid']}"

    assert push.push(Shelf()) == ("/d/pengserve", "/d/pengserve-ray")
    assert [model["title"] for model in Shelf.saved] == ["PengServe", "PengServe (through Ray)"]


def test_push_tells_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("GRAFANA_TOKEN", raising=False)
    for arguments, token, expected in (
        (["http://127.0.0.1:1"], "", "GRAFANA_TOKEN"),
        (["not a url"], "x", "http://host:3000"),
        (["http://127.0.0.1:1", "--backend", "graphite"], "x", "prometheus, ray"),
    ):
        monkeypatch.setenv("GRAFANA_TOKEN", token)
        with pytest.raises(SystemExit) as ended:
            main(["dashboards", "push", *arguments])
        assert ended.value.code == 1
        assert expected in capsys.readouterr().err


def test_the_alerts_are_up_to_date_and_all_in_the_handbook() -> None:
    assert (ROOT / "dashboards" / alerts.FILE).read_text() == alerts.render(), "run python -m dashboards.build"
    handbook = (ROOT / "docs" / "operators.md").read_text()
    assert [alert.name for alert in alerts.ALERTS if f"`{alert.name}`" not in handbook] == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_alerts_and_they_fire_when_they_should(tmp_path: Path) -> None:
    rules = ROOT / "dashboards" / alerts.FILE
    done = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    tests = tmp_path / "tests.yml"
    tests.write_text(ALERT_TESTS.replace("RULES", str(rules)))
    done = subprocess.run(["promtool", "test", "rules", tests], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_scrape_configuration() -> None:
    config = ROOT / "dashboards" / "prometheus.yml"
    done = subprocess.run(["promtool", "check", "config", config], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
