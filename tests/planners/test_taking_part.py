"""Who can take part in a switch: one sentence for each reason why not."""

import pytest

from pengserve.planners.taking_part import require_joining, require_leaving
from pengserve.planners.types.errors import StepError
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.layout import Group
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.strategy import SwitchStrategy

KEYS = tuple(InstanceKey(instance_id=InstanceId(i), incarnation=1) for i in range(4))


def a_plan(group: str, *parts: str, is_merge: bool) -> SwitchPlan:
    wide = Group.parse(group)
    return SwitchPlan(
        plan_id="p",
        epoch=Epoch(1),
        group=wide,
        members=KEYS[: wide.degree],
        is_merge=is_merge,
        strategy=SwitchStrategy.CARRY,
        parts=tuple(map(Group.parse, parts)),
    )


def test_a_member_joins_from_the_part_that_the_plan_was_made_for() -> None:
    plan = a_plan("pp4@(0..3)", "pp2@(0,1)", "dp@(2)", "dp@(3)", is_merge=True)
    require_joining(plan, KEYS[1], "pp2@(0,1)", is_waiting=False)
    require_joining(plan, KEYS[3], "dp", is_waiting=False)
    with pytest.raises(StepError, match=r"instance 1.1 runs dp, and the plan is made for pp2@\(0,1\); plan again"):
        require_joining(plan, KEYS[1], "dp", is_waiting=False)
    with pytest.raises(StepError, match=r"instance 2.1 runs tp2@\(2,3\), and the plan is made for dp"):
        require_joining(plan, KEYS[2], "tp2@(2,3)", is_waiting=False)
    with pytest.raises(StepError, match="still waits for KV, memory or weights"):
        require_joining(plan, KEYS[0], "pp2@(0,1)", is_waiting=True)


def test_a_member_leaves_the_group_that_it_runs_where_its_requests_fit() -> None:
    plan = a_plan("tp2@(0,1)", is_merge=False)

    def leave(runs: str = "tp2@(0,1)", longest: int = 100, *, is_waiting: bool = False) -> None:
        requests = [("a", 10), ("b", longest)]
        require_leaving(plan, KEYS[0], runs, is_waiting=is_waiting, requests=requests, limit=lambda: 100)

    leave()
    with pytest.raises(StepError, match=r"instance 0.1 does not run tp2@\(0,1\)"):
        leave("dp")
    with pytest.raises(StepError, match="still waits for KV or memory since its drop"):
        leave(is_waiting=True)
    with pytest.raises(StepError, match="request b may grow to 101 tokens and dp@\\(0\\) holds 100"):
        leave(longest=101)


def test_who_has_no_requests_is_not_asked_what_fits() -> None:
    def limit() -> int:
        raise AssertionError("it was asked")

    plan = a_plan("tp2@(0,1)", is_merge=False)
    require_leaving(plan, KEYS[1], "tp2@(0,1)", is_waiting=False, requests=(), limit=limit)
