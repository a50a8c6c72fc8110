"""Metrics through Ray: each process hands its values to its node's agent, which Prometheus scrapes.

Ray exports a counter `x` as `ray_x_total` and adds its own labels (`WorkerId`, `NodeAddress`, ...).
"""

from collections.abc import Iterable
from typing import Any

import prometheus_client
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from ray.util import metrics as ray_metrics

from pengserve.cluster.metrics.catalog import MetricKind, MetricSpec


class _Bound:
    """A Ray metric with its tags. Ray copies the dict on every record, so one dict serves for good."""

    __slots__ = ("_metric", "_tags")

    def __init__(self, metric: Any, tags: dict[str, str]) -> None:
        self._metric, self._tags = metric, tags

    def inc(self, amount: float = 1.0) -> None:
        """Ray refuses increments that are not positive."""
        if amount > 0:
            self._metric.inc(amount, self._tags)

    def set(self, value: float) -> None:
        """Replaces the value."""
        self._metric.set(value, self._tags)

    def observe(self, value: float) -> None:
        """Counts `value` into its bucket."""
        self._metric.observe(value, self._tags)


class RayBackend:
    """Ray's metric objects of all specs. Tags must be declared beforehand, as the catalog does."""

    def __init__(self, specs: Iterable[MetricSpec]) -> None:
        self._metrics: dict[str, Any] = {spec.name: self._create(spec) for spec in specs}

    def counter(self, spec: MetricSpec, labels: tuple[str, ...]) -> _Bound:
        """The counter of these tags."""
        return self._bind(spec, labels)

    def gauge(self, spec: MetricSpec, labels: tuple[str, ...]) -> _Bound:
        """The gauge of these tags."""
        return self._bind(spec, labels)

    def histogram(self, spec: MetricSpec, labels: tuple[str, ...]) -> _Bound:
        """The histogram of these tags."""
        return self._bind(spec, labels)

    def exposition(self) -> tuple[bytes, str]:
        """What Ray's agents do not export: this process's default registry."""
        note = b"# PengServe's metrics are exported by Ray's metric agents, with the prefix ray_.\n"
        return note + generate_latest(prometheus_client.REGISTRY), CONTENT_TYPE_PLAIN_0_0_4

    def _bind(self, spec: MetricSpec, labels: tuple[str, ...]) -> _Bound:
        return _Bound(self._metrics[spec.name], dict(zip(spec.all_labels, labels, strict=True)))

    def _create(self, spec: MetricSpec) -> Any:
        if spec.kind is MetricKind.COUNTER:  # Ray appends `_total` itself
            return ray_metrics.Counter(spec.name.removesuffix("_total"), spec.help, spec.all_labels)
        if spec.kind is MetricKind.GAUGE:
            return ray_metrics.Gauge(spec.name, spec.help, spec.all_labels)
        return ray_metrics.Histogram(spec.name, spec.help, list(spec.buckets), spec.all_labels)


def open_backend(specs: Iterable[MetricSpec]) -> RayBackend:
    """A backend that has all of `specs`. Needs `ray.init`."""
    return RayBackend(specs)
