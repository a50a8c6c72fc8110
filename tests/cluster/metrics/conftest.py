"""Shared parts of the metrics tests."""

import pytest

from pengserve.cluster.metrics.facade import Metrics


@pytest.fixture
def metrics() -> Metrics:
    """An embedded facade of its own registry."""
    return Metrics("prometheus", app="shop")
