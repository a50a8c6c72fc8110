"""The drain of an instance looks at what runs there now, also at requests that no ingress sent to it."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.snapshot import InstanceState, InstanceStats
from pengserve.replicas.instance import Instance


class Owner:
    """The ingress's side: requests that were sent here, and what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[list[str], object, bool]] = []

    def ids(self) -> list[str]:
        return ["a", "b"]

    def moved(self, request_ids: list[str], to: object, *, carried: bool) -> None:
        self.told.append((request_ids, to, carried))


@pytest.mark.parametrize("ends", [True, False])
def test_an_instance_that_leaves_sends_again_what_neither_moves_nor_ends(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    instance = Instance(InstanceConfig(app="tests", model="m"), InstanceKey(instance_id=InstanceId(0), incarnation=1))
    running, owner = {"a", "b"}, Owner()
    lanes: Any = SimpleNamespace(
        num_requests=lambda: len(running), abort=running.difference_update, stats=InstanceStats, is_reading=bool
    )
    monkeypatch.setattr(instance, "_lanes", lanes)
    monkeypatch.setattr(instance, "_requests", owner)
    monkeypatch.setattr(instance, "_state", InstanceState.READY)
    monkeypatch.setattr(instance._loop, "submit", lambda command: command())
    if ends:
        running.clear()
    started_s = time.monotonic()
    assert instance.leave(0.4)
    assert instance._state is InstanceState.DRAINING
    assert owner.told == ([] if ends else [(["a", "b"], None, False)])
    assert ends or 0.2 <= time.monotonic() - started_s < 10.0


def test_an_instance_that_starts_has_nothing_to_leave() -> None:
    instance = Instance(InstanceConfig(app="tests", model="m"), InstanceKey(instance_id=InstanceId(0), incarnation=1))
    assert instance.leave(60.0)


def test_a_drain_waits_for_requests_that_came_from_other_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = Instance(InstanceConfig(app="tests", model="m"), InstanceKey(instance_id=InstanceId(0), incarnation=1))
    running = [2]
    lanes: Any = SimpleNamespace(num_requests=lambda: running[0])
    monkeypatch.setattr(instance, "_lanes", lanes)
    monkeypatch.setattr(instance._loop, "submit", lambda command: command())
    assert not instance.drain(0.01)
    running[0] = 0
    assert instance.drain(0.01)
