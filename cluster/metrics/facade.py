"""One way to record metrics, two ways out: a Prometheus scrape of this process, or Ray's metric agents.

    hits = metrics.counter(catalog.DISPATCHED, instance_id="0")   # once
    hits.inc()                                                    # on the hot path: no look-up, no label handling

Gauges that mirror a state are set by callbacks (`on_refresh`) just before they are read, not when the state changes.
"""

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any, Protocol

from pengserve.cluster.metrics.catalog import APP_LABEL, CATALOG, MetricKind, MetricSpec
from pengserve.planners.types.errors import ConfigError

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "prometheus", "ray")


class Counter(Protocol):
    """A counter with all labels bound."""

    def inc(self, amount: float = 1.0) -> None:
        """Adds `amount` > 0."""


class Gauge(Protocol):
    """A gauge with all labels bound."""

    def set(self, value: float) -> None:
        """Replaces the value."""


class Histogram(Protocol):
    """A histogram with all labels bound."""

    def observe(self, value: float) -> None:
        """Counts `value` into its bucket."""


class MetricsBackend(Protocol):
    """Where metrics go. `labels` are complete and in the order of `spec.all_labels`."""

    def counter(self, spec: MetricSpec, labels: tuple[str, ...]) -> Counter:
        """The bound counter of these label values."""

    def gauge(self, spec: MetricSpec, labels: tuple[str, ...]) -> Gauge:
        """The bound gauge of these label values."""

    def histogram(self, spec: MetricSpec, labels: tuple[str, ...]) -> Histogram:
        """The bound histogram of these label values."""

    def exposition(self) -> tuple[bytes, str]:
        """Body and content type of an answer to `GET /metrics`."""


class Metrics:
    """All metrics of one process. Every metric of the catalog exists from the start, so that charts never miss one.

    Safe to record from any thread. Label values are strings.
    """

    def __init__(self, backend: str = "auto", *, app: str = "pengserve", num_ingresses: int = 1) -> None:
        """Opens the backend `auto`, `prometheus` or `ray`.

        Args:
            app: name of the application, the label of every metric.
            num_ingresses: ingress replicas; a scrape through Serve's proxy reaches only one of several.

        Raises:
            ConfigError: `backend` is none of these.
        """
        self.backend_name = resolve_backend(backend, num_ingresses=num_ingresses)
        module = importlib.import_module(f"pengserve.cluster.metrics.{self.backend_name}_backend")
        self._backend: MetricsBackend = module.open_backend(CATALOG.values())
        self._app = app
        self._bound: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._refreshers: list[Callable[[], None]] = []

    def counter(self, spec: MetricSpec, **labels: str) -> Counter:
        """The counter `spec` with `labels`; the same object each time."""
        bound: Counter = self._bind(spec, MetricKind.COUNTER, labels)
        return bound

    def gauge(self, spec: MetricSpec, **labels: str) -> Gauge:
        """The gauge `spec` with `labels`; the same object each time."""
        bound: Gauge = self._bind(spec, MetricKind.GAUGE, labels)
        return bound

    def histogram(self, spec: MetricSpec, **labels: str) -> Histogram:
        """The histogram `spec` with `labels`; the same object each time."""
        bound: Histogram = self._bind(spec, MetricKind.HISTOGRAM, labels)
        return bound

    def on_refresh(self, callback: Callable[[], None]) -> None:
        """Calls `callback` before every scrape (or period, with Ray) so that it sets its gauges."""
        self._refreshers.append(callback)

    def refresh(self) -> None:
        """Brings all mirrored gauges up to date. One broken callback does not hide the others' values."""
        for callback in self._refreshers:
            try:
                callback()
            except Exception:
                logger.exception("a metrics callback failed; its values are stale")

    def exposition(self) -> tuple[bytes, str]:
        """Body and content type for `GET /metrics`: PengServe's metrics and all of this process's default registry.

        vLLM registers its metrics in that default registry. With Ray as the backend, Ray's agents export both, and
        only the default registry remains here.
        """
        self.refresh()
        return self._backend.exposition()

    def _bind(self, spec: MetricSpec, kind: MetricKind, labels: dict[str, str]) -> Any:
        assert spec.kind is kind, f"{spec.name} is a {spec.kind}"
        labels = {APP_LABEL: self._app, **labels}
        values = tuple(labels.pop(name) for name in spec.all_labels)
        assert not labels, f"{spec.name} has no label {', '.join(labels)}"
        bound = self._bound.get((spec.name, values))
        if bound is None:
            bound = getattr(self._backend, kind.value)(spec, values)
            self._bound[spec.name, values] = bound
        return bound


def resolve_backend(backend: str, *, num_ingresses: int = 1) -> str:
    """`auto` becomes `ray` in a Ray worker of a cluster of several nodes or ingresses, else `prometheus`.

    Raises:
        ConfigError: not one of `auto`, `prometheus`, `ray`.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"metrics.backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend != "auto":
        return backend
    return "ray" if _in_ray_worker() and (num_ingresses > 1 or _num_ray_nodes() > 1) else "prometheus"


def _in_ray_worker() -> bool:
    """Whether Ray runs this process as a worker. Does not import Ray: a process that has not imported it is none."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    return bool(ray.get_runtime_context().worker.mode == ray.WORKER_MODE)


def _num_ray_nodes() -> int:
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes())
