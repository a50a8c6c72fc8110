"""Laws of prepared plans and of drains."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from pengserve.planners.types.errors import FenceError, StepError
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.strategy import SwitchStrategy
from pengserve.replicas.switching import prepared as module
from pengserve.replicas.switching.changes.table import CHANGES, change_of
from pengserve.replicas.switching.draining import Draining
from pengserve.replicas.switching.prepared import PREPARED_S, Prepared
from tests.replicas.switching.members import KEYS, FakeLane, plan


def make(own: int = 0) -> Prepared:
    member: Any = SimpleNamespace(key=KEYS[own])
    return Prepared(member, None, None)  # type: ignore[arg-type]


def test_a_plan_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    prepared = make()
    prepared.note(plan(1))
    prepared.note(plan(2))
    assert "1" in prepared and "2" in prepared and "3" not in prepared
    now_s += PREPARED_S + 1
    prepared.note(plan(3))
    assert "1" not in prepared and "3" in prepared


def test_a_committed_plan_fences_those_before_it() -> None:
    prepared = make()
    prepared.note(plan(4))
    prepared.committed(plan(4))
    assert prepared.epoch == 5 and "4" not in prepared
    with pytest.raises(FenceError, match="the plan is for epoch 4"):
        prepared.check(plan(4))


def test_a_plan_for_another_life_of_this_instance_is_refused() -> None:
    member: Any = SimpleNamespace(key=type(KEYS[0])(instance_id=KEYS[0].instance_id, incarnation=2))
    prepared = Prepared(member, None, None)  # type: ignore[arg-type]
    with pytest.raises(FenceError, match="is not a member of"):
        prepared.check(plan(1))


def test_every_verb_of_a_plan_has_one_change() -> None:
    assert sorted(CHANGES) == ["drop", "merge", "restore", "split"]
    assert len({change_of(plan(1)), change_of(plan(1, is_merge=False))}) == 2
    for change in CHANGES.values():
        assert not getattr(change, "__abstractmethods__", None), "all five steps"


def drain(strategy: SwitchStrategy, *running: str) -> tuple[Any, Draining, list[str]]:
    lane: Any = FakeLane(0)
    lane.running_ids = set(running)
    done: list[str] = []
    switch: SwitchPlan = plan(1, strategy=strategy)
    return lane, Draining(lane, switch, lambda: done.append("drained")), done


@pytest.mark.parametrize("strategy", [SwitchStrategy.SEQUENTIAL, SwitchStrategy.SOFT])
def test_a_drain_waits_for_what_ran_when_it_began_and_for_nothing_else(strategy: SwitchStrategy) -> None:
    lane, draining, done = drain(strategy, "a", "b")
    assert lane.is_paused, "new requests wait"
    lane.running_ids = {"b", "new"}
    draining.check()
    assert done == []
    lane.running_ids = {"new"}
    draining.check()
    draining.check()
    assert done == ["drained"], "said once"
    assert lane.is_paused == (strategy is SwitchStrategy.SEQUENTIAL), "under soft new ones run meanwhile"
    assert draining.end() == {"a", "b"} and not lane.is_paused


def test_a_drain_that_is_called_off_lets_new_requests_begin() -> None:
    lane, draining, done = drain(SwitchStrategy.SEQUENTIAL, "a")
    assert draining.end() == {"a"} and not lane.is_paused and done == []


def test_a_plan_that_was_not_made_for_what_runs_is_refused_in_one_sentence() -> None:
    lanes = SimpleNamespace(running=None)
    member: Any = SimpleNamespace(key=KEYS[0], lanes=lanes)
    with pytest.raises(StepError, match="does not run"):
        change_of(plan(1, is_merge=False)).check(member, None, plan(1, is_merge=False))  # type: ignore[arg-type]
