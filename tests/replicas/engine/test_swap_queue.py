"""What a pipeline's members copy before a microbatch."""

import pytest

pytest.importorskip("vllm")

from pengserve.replicas.engine.tiers.swap_queue import SwapQueue
from pengserve.replicas.kv.stage_rows import Swap


def test_saves_are_one_swap_until_something_comes() -> None:
    queue = SwapQueue()
    queue.save([1, 2], [10, 11])
    queue.save([3], [12])
    assert queue.bring([4], [10]) == 1
    queue.save([5], [10])
    first, second, third = queue.take()
    assert first == Swap([1, 2, 3], [10, 11, 12], to_host=True)
    assert second == Swap([4], [10], to_host=False, number=1)
    assert third == Swap([5], [10], to_host=True)
    assert queue.take() == []


def test_a_row_that_is_given_to_another_block_meanwhile_has_that_ones_kv() -> None:
    """Its first block's prefix has lost its row again: two copies at once would leave either of them there."""
    queue = SwapQueue()
    queue.save([1, 2], [10, 11])
    queue.save([3, 4], [12, 10])
    assert queue.take() == [Swap([2, 3, 4], [11, 12, 10], to_host=True)]
