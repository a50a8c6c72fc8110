"""Law: what goes on beside the steps of a group gets as long as a step takes, on its leader and its followers alike."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pengserve.replicas.engine.stepper import Stepper

STEP_S = 0.05


class SlowLane:
    """A group's lane, as far as it is stepped."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def enter(self, run: object) -> None: ...

    def has_work(self) -> bool:
        return True

    def step(self) -> Mapping[int, Any]:
        time.sleep(STEP_S)
        return {}

    def follow(self, parts: Sequence[Any]) -> None:
        time.sleep(STEP_S)


@pytest.mark.parametrize("is_leading", [True, False])
def test_a_piece_is_as_long_as_the_newest_step(is_leading: bool) -> None:
    pieces: list[float] = []
    stepper: Any = Stepper(None, lambda error: None)  # type: ignore[arg-type]  # the `dp` lane takes no step here
    stepper.enter(SlowLane(0 if is_leading else 1), None)
    stepper.do_beside(lambda step_s: bool(pieces.append(step_s)) or len(pieces) == 2)
    for _ in range(2):
        if not is_leading:
            stepper.follow(())
        stepper.step()
    assert len(pieces) == 2 and min(pieces) >= STEP_S
    assert is_leading or not stepper.has_work(), "it has ended"
    stepper.step()
    assert len(pieces) == 2, "it has ended"
