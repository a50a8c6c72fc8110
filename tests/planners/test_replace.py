"""Which slots are filled."""

from pengserve.planners.replace import Vacancy, plan_replacements
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey


def vacancy(instance_id: int, retry_at_s: float) -> Vacancy:
    key = InstanceKey(instance_id=InstanceId(instance_id), incarnation=1)
    return Vacancy(last_key=key, retry_at_s=retry_at_s, why="lost")


def test_fills_what_is_due_and_nothing_else() -> None:
    plan = plan_replacements([vacancy(2, 5), vacancy(0, 6), vacancy(1, 5)], epoch=Epoch(3), now_s=5)
    assert plan is not None
    assert (plan.slots, plan.epoch) == ((1, 2), 3)


def test_nothing_due_is_no_plan() -> None:
    assert plan_replacements([], epoch=Epoch(0), now_s=0) is None
    assert plan_replacements([vacancy(0, 6)], epoch=Epoch(0), now_s=5.9) is None


def test_the_same_vacancies_give_the_same_plan_in_any_order() -> None:
    some = [vacancy(i, 0) for i in range(5)]
    assert plan_replacements(some, epoch=Epoch(1), now_s=0) == plan_replacements(some[::-1], epoch=Epoch(1), now_s=0)


def test_no_more_are_filled_than_may_start() -> None:
    some = [vacancy(i, 0) for i in (3, 1, 2)]
    plan = plan_replacements(some, epoch=Epoch(1), now_s=0, num_starts=2)
    assert plan is not None and plan.slots == (1, 2)
    assert plan_replacements(some, epoch=Epoch(1), now_s=0, num_starts=0) is None
