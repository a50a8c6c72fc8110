"""Laws of steps of an engine: each call has one result, in order, and what a step took and read is its own."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("vllm")
from pengserve.replicas.engine.lanes.engine_steps import EngineSteps

pytestmark = pytest.mark.slow  # it imports vLLM

STEP_S, BESIDE_S = 10.0, 2.0  # of a step on the device; of what happens between two calls


class Waiting:
    """What stands for vLLM's scheduler."""

    def __init__(self, prompts: deque[int]) -> None:
        self.prompts = prompts

    def has_requests(self) -> bool:
        return bool(self.prompts)


class Core:
    """Steps as vLLM's `EngineCore` does, on a device that computes one after the other. Outputs are the steps' numbers.

    `depth` 1: a step is scheduled when the one before has ended.
    """

    def __init__(self, prompts: list[int], depth: int) -> None:
        self.prompts = deque(prompts)  # tokens that each step reads
        self.batch_queue: deque[tuple[int, float]] | None = deque() if depth > 1 else None
        self.scheduler = Waiting(self.prompts)
        self.step_fn: Any = self.step_ahead if depth > 1 else self.step
        self.now_s, self.free_s, self.number = 100.0, 0.0, 0
        self.num_scheduled, self.depth = 0, depth

    def schedule(self) -> tuple[int, float]:
        self.prompts.popleft()
        self.number += 1
        self.num_scheduled += 1
        self.free_s = max(self.free_s, self.now_s) + STEP_S
        return self.number, self.free_s

    def take(self, step: tuple[int, float]) -> dict[int, Any]:
        number, ends_s = step
        self.now_s = max(self.now_s, ends_s)
        return {0: number}

    def step(self) -> tuple[dict[int, Any], bool]:
        return (self.take(self.schedule()), True) if self.prompts else ({}, False)

    def step_ahead(self) -> tuple[dict[int, Any] | None, bool]:
        assert self.batch_queue is not None and len(self.batch_queue) < self.depth
        if self.scheduler.has_requests():
            self.batch_queue.appendleft(self.schedule())
            if len(self.batch_queue) < self.depth:
                return None, True
        elif not self.batch_queue:
            return None, False
        return self.take(self.batch_queue.pop()), True

    def post_step(self, is_executed: bool) -> None:
        """Nothing is guessed here."""


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_step_has_its_own_result_time_and_tokens(depth: int) -> None:
    prompts = [5, 0, 0, 7, 0, 0]
    core, entered = Core(prompts, depth), 0

    @contextmanager
    def choosing() -> Iterator[None]:
        nonlocal entered
        before = core.num_scheduled
        yield
        entered += 1
        assert core.num_scheduled - before <= 1, "what it chooses from is for one step"

    steps, found = EngineSteps(core, lambda: core.now_s), []
    while core.prompts or steps.under_way:
        found.append(steps.step(choosing, lambda: sum(core.prompts)))
        core.now_s += BESIDE_S  # hidden under the next step, where that is under way
    assert [result.outputs[0] for result in found] == list(range(1, len(prompts) + 1))  # type: ignore[comparison-overlap]
    assert [result.seconds for result in found] == [STEP_S] * len(prompts)
    assert [result.num_read for result in found] == prompts
    assert entered >= core.num_scheduled == len(prompts)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_that_are_ended_leave_nothing_under_way_and_whole_ones_do_not_overlap(depth: int) -> None:
    prompts = [5, 0, 7, 0, 0, 2, 0]
    core = Core(prompts, depth)
    steps, found = EngineSteps(core, lambda: core.now_s), []
    ways = (_nothing, lambda: sum(core.prompts))
    found.append(steps.step(*ways))
    assert steps.under_way == (depth > 1)
    while (result := steps.end_step()) is not None:
        found.append(result)
    assert not steps.under_way and core.num_scheduled == len(found) == depth
    core.now_s += BESIDE_S
    for _ in range(2):
        found.append(steps.whole(*ways))
        assert not steps.under_way and core.num_scheduled == len(found)
        core.now_s += BESIDE_S
    while core.prompts or steps.under_way:
        found.append(steps.step(*ways))
    assert [result.outputs[0] for result in found] == list(range(1, len(prompts) + 1))  # type: ignore[comparison-overlap]
    assert [result.seconds for result in found] == [STEP_S] * len(prompts)
    assert [result.num_read for result in found] == prompts


def test_a_step_that_is_under_way_comes_before_a_whole_one() -> None:
    core = Core([0, 0, 0], depth=2)
    steps = EngineSteps(core, lambda: core.now_s)
    found = [steps.step(_nothing, lambda: None).outputs[0]]
    found += [steps.whole(_nothing, lambda: None).outputs[0] for _ in range(2)]
    assert (found, steps.under_way) == ([1, 2, 3], False)  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_idle_engine_has_no_result(depth: int) -> None:
    steps = EngineSteps(Core([], depth), lambda: 0.0)
    assert not steps.under_way
    assert steps.step(_nothing, lambda: None).outputs == {}


def test_tokens_are_not_told_of_a_step_that_began_before_they_were_counted() -> None:
    core = Core([3, 4, 5, 0], depth=2)
    steps = EngineSteps(core, lambda: core.now_s)
    found = [steps.step(_nothing, lambda: None).num_read]
    found += [steps.step(_nothing, lambda: sum(core.prompts)).num_read for _ in range(3)]
    assert found == [None, None, 5, 0]


@contextmanager
def _nothing() -> Iterator[None]:
    yield
