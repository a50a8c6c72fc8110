"""The drain of an instance looks at what runs there now, also at requests that no ingress sent to it."""

from types import SimpleNamespace
from typing import Any

import pytest

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.replicas.instance import Instance


def test_a_drain_waits_for_requests_that_came_from_other_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = Instance(InstanceConfig(app="tests", model="m"), InstanceKey(instance_id=InstanceId(0), incarnation=1))
    running = [2]
    lanes: Any = SimpleNamespace(num_requests=lambda: running[0])
    monkeypatch.setattr(instance, "_lanes", lanes)
    monkeypatch.setattr(instance._loop, "submit", lambda command: command())
    assert not instance.drain(0.01)
    running[0] = 0
    assert instance.drain(0.01)
