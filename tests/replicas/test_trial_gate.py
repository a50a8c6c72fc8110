"""The gate that lets a suspect of an instance's death run where nothing unproven runs beside it."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from pengserve.planners.types.snapshot import InstanceStats
from pengserve.replicas.trial_gate import PROVEN_STEPS, PROVEN_TOKENS, TRIAL_S, WAIT_S, TrialGate


@dataclass(frozen=True)
class Request:
    request_id: str


@dataclass
class Engine:
    """What computes behind a gate: a token for each request in a step."""

    running: dict[str, Request] = field(default_factory=dict)
    told: list[tuple[str, bool]] = field(default_factory=list)
    now_s: float = 0.0
    num_waiting: int = 0
    num_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.gate: TrialGate[Request] = TrialGate(
            let_in=lambda request: self.running.__setitem__(request.request_id, request),
            tell=lambda request, is_alone: self.told.append((request.request_id, is_alone)),
            num_requests=lambda: len(self.running),
            is_reading=lambda: self.num_waiting > 0,
            clock=lambda: self.now_s,
        )

    def take(self, *names: str, is_tried_alone: bool = False) -> None:
        for name in names:
            self.gate.take(Request(name), is_tried_alone=is_tried_alone)

    def step(self, times: int = 1, finished: str = "") -> None:
        for _ in range(times):
            outputs = [
                SimpleNamespace(request_id=name, new_token_ids=[1], finish_reason="stop" if name == finished else None)
                for name in self.running
            ]
            self.running.pop(finished, None)
            stats = InstanceStats(num_waiting=self.num_waiting, total_prompt_tokens=self.num_prompt_tokens)
            self.gate.stepped(outputs, stats)

    def forget(self, name: str) -> None:
        self.running.pop(name, None)
        self.gate.forget([name])


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_without_a_suspect_each_request_starts_at_once(engine: Engine) -> None:
    engine.take("a", "b")
    assert list(engine.running) == ["a", "b"]
    assert not engine.told and not engine.gate.is_closed


def test_a_suspect_on_an_idle_instance_starts_at_once_and_holds_what_comes_then(engine: Engine) -> None:
    engine.take("suspect", is_tried_alone=True)
    engine.take("a", "b")
    assert list(engine.running) == ["suspect"] and engine.told == [("suspect", True)]
    engine.step(PROVEN_TOKENS - 1)
    assert list(engine.running) == ["suspect"] and engine.gate.num_held == 2
    engine.step()
    assert list(engine.running) == ["suspect", "a", "b"], "what was held goes on in order"
    assert not engine.gate.is_closed


def test_a_suspect_waits_until_what_runs_is_proven(engine: Engine) -> None:
    engine.take("a")
    engine.step(PROVEN_STEPS - 1)
    engine.take("suspect", is_tried_alone=True)
    engine.take("b")
    assert list(engine.running) == ["a"] and not engine.told, "nothing is said before the trial begins"
    engine.step()
    assert list(engine.running) == ["a", "suspect"] and engine.told == [("suspect", True)]


def test_a_suspect_starts_at_once_beside_what_is_proven(engine: Engine) -> None:
    engine.take("a")
    engine.step(PROVEN_STEPS)
    engine.take("suspect", is_tried_alone=True)
    assert engine.told == [("suspect", True)]


def test_what_waits_or_reads_its_prompt_is_not_proven(engine: Engine) -> None:
    engine.take("a")
    engine.num_waiting = 1
    engine.step(3 * PROVEN_STEPS)
    engine.take("suspect", is_tried_alone=True)
    engine.num_waiting = 0
    engine.step(PROVEN_STEPS - 1)
    engine.num_prompt_tokens = 100  # another prompt was computed in the step that follows
    engine.step(PROVEN_STEPS)
    assert not engine.told
    engine.step()
    assert engine.told == [("suspect", True)]


def test_two_suspects_are_tried_one_after_the_other_in_the_order_they_came(engine: Engine) -> None:
    engine.take("first", "second", is_tried_alone=True)
    engine.take("a")
    engine.step(PROVEN_TOKENS)
    assert engine.told == [("first", True), ("second", True)]
    assert list(engine.running) == ["first", "second"], "the first is proven by its trial"
    engine.step(PROVEN_TOKENS)
    assert list(engine.running) == ["first", "second", "a"]


@pytest.mark.parametrize("end", ["finished", "forgotten"])
def test_a_trial_ends_with_its_request(engine: Engine, end: str) -> None:
    engine.take("suspect", is_tried_alone=True)
    engine.take("a")
    if end == "finished":
        engine.step(finished="suspect")
    else:
        engine.forget("suspect")
    assert list(engine.running) == ["a"] and not engine.gate.is_closed


def test_held_requests_are_forgotten(engine: Engine) -> None:
    engine.take("a")
    engine.take("suspect", is_tried_alone=True)
    engine.take("b", "c")
    engine.forget("b")
    engine.forget("suspect")
    assert list(engine.running) == ["a", "c"] and engine.gate.num_held == 0 and not engine.told


def test_nothing_waits_for_longer_than_the_limits(engine: Engine) -> None:
    engine.take("a")
    engine.take("suspect", is_tried_alone=True)
    engine.take("b")
    engine.now_s = WAIT_S
    engine.gate.tend()  # no step was made: the instance may not be able to
    assert list(engine.running) == ["a", "suspect", "b"]
    assert engine.told == [("suspect", False)], "its ingress learns that it is not alone"


def test_a_trial_that_makes_no_progress_is_over(engine: Engine) -> None:
    engine.take("suspect", is_tried_alone=True)
    engine.take("a")
    engine.now_s = TRIAL_S
    engine.gate.tend()
    assert list(engine.running) == ["suspect", "a"]
    assert engine.told == [("suspect", True), ("suspect", False)]


def test_a_change_of_shape_ends_the_trial_and_proves_nothing(engine: Engine) -> None:
    engine.take("a")
    engine.step(PROVEN_STEPS)
    engine.take("suspect", is_tried_alone=True)
    engine.gate.requests_moved()
    engine.take("second", is_tried_alone=True)
    assert engine.told == [("suspect", True), ("suspect", False)]
    engine.step(PROVEN_STEPS)
    assert engine.told[-1] == ("second", True)


def test_a_trial_whose_request_was_carried_away_holds_nothing(engine: Engine) -> None:
    engine.take("suspect", is_tried_alone=True)
    engine.take("a", "b")
    engine.running.clear()
    engine.gate.tend()
    assert list(engine.running) == ["a", "b"]
