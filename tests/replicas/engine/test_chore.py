"""Law: what is sent beside steps gets as long as a step takes: on a leader, on its followers, and in `dp`."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from pengserve.replicas.engine.stepper import Stepper

STEP_S = 0.05


class SlowLane:
    """A lane, as far as it is stepped."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.steps: list[str] = []

    def enter(self, run: object) -> None: ...

    def has_work(self) -> bool:
        return True

    def step(self) -> Mapping[int, Any]:
        self.steps.append("whole")
        time.sleep(STEP_S)
        return {}

    def step_ahead(self) -> Mapping[int, Any]:
        self.steps.append("ahead")
        return {}

    def follow(self, parts: Sequence[Any]) -> None:
        time.sleep(STEP_S)


class TwoPieces:
    """Transfers of which two pieces are to be sent."""

    def __init__(self) -> None:
        self.pieces: list[float] = []  # how long each may take, s

    @property
    def is_busy(self) -> bool:
        return len(self.pieces) < 2

    def advance(self, budget_s: float) -> None:
        self.pieces.append(budget_s)


def make_stepper(dp: Any = None) -> tuple[Any, TwoPieces]:
    transfers: Any = TwoPieces()
    return Stepper(dp, transfers, lambda error: None), transfers


@pytest.mark.parametrize("is_leading", [True, False])
def test_a_piece_is_as_long_as_the_newest_step(is_leading: bool) -> None:
    stepper, transfers = make_stepper()  # the `dp` lane takes no step here
    stepper.enter(SlowLane(0 if is_leading else 1), None)
    for _ in range(2):
        if not is_leading:
            stepper.follow(())
        stepper.step()
    assert len(transfers.pieces) == 2 and min(transfers.pieces) >= STEP_S
    assert is_leading or not stepper.has_work(), "it has ended"
    stepper.step()
    assert len(transfers.pieces) == 2, "it has ended"


def test_an_instance_alone_sends_beside_its_steps_too_and_no_step_overlaps_what_is_sent() -> None:
    dp = SlowLane()
    stepper, transfers = make_stepper(dp)
    for _ in range(4):
        stepper.step()
    assert len(transfers.pieces) == 2 and min(transfers.pieces) >= STEP_S
    assert dp.steps == ["whole", "whole", "ahead", "ahead"]


def test_steps_do_not_overlap_while_something_acts_between_them() -> None:
    dp = SlowLane()
    stepper, transfers = make_stepper(dp)
    transfers.pieces = [0.0, 0.0]  # all is sent
    for is_switching in (False, True, True, False):
        stepper.needs_boundaries = partial(bool, is_switching)
        stepper.step()
    assert dp.steps == ["ahead", "whole", "whole", "ahead"]


def test_an_instance_without_requests_still_sends() -> None:
    stepper, transfers = make_stepper(SimpleNamespace(has_work=lambda: False))
    while stepper.has_work():
        assert stepper.step() == {}
    assert len(transfers.pieces) == 2
