"""Law: what goes on beside the steps of a group gets as long as a step takes, on its leader and its followers alike."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pengserve.replicas.engine.lanes import Lanes

STEP_S = 0.05


class SlowLane:
    """A group's lane, as far as `Lanes` steps it."""

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
    lanes: Any = Lanes.__new__(Lanes)  # no engine: this is about the order of steps and pieces alone
    lanes._running, lanes._is_leading, lanes._step_s = SlowLane(), is_leading, 0.001
    lanes.chore = lambda step_s: bool(pieces.append(step_s)) or len(pieces) == 2
    for _ in range(2):
        if not is_leading:
            lanes.follow(())
        lanes.step()
    assert len(pieces) == 2 and min(pieces) >= STEP_S
    assert lanes.chore is None, "it has ended"
