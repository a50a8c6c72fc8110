"""A copy ends, or what needs it hears that it cannot."""

import numpy as np
import pytest
import torch

from pengserve.planners.types.errors import HostTierError
from pengserve.replicas.kv.copies import Copy, CopyEngine, Priority, Sides
from pengserve.replicas.kv.stage_copies import StageCopies
from tests.replicas.kv.tiered_world import TieredWorld


def a_copy(rows: int) -> Copy:
    """Of one block between two tensors; where there are too few rows, it fails."""
    ids = np.array([3])
    memory = [torch.zeros(count, 2, dtype=torch.int64) for count in (4, rows)]
    return Copy(Priority.BRING, 0, ids, ids, ids, to_host=False, sides=Sides(*memory))


def test_after_one_has_failed_none_waits_for_ever() -> None:
    world = TieredWorld(2, 4, 4, 2)
    engine: CopyEngine = world.tiers.engine
    copies = StageCopies(engine)
    copies.begin([1], [1], [a_copy(4)], to_host=False, number=1)
    copies.wait_all()
    copies.begin([1], [1], [a_copy(1)], to_host=False, number=2)
    with pytest.raises(HostTierError, match="failed"):
        copies.wait_for([1])
    copies.begin([2], [2], [a_copy(4)], to_host=False, number=3)
    with pytest.raises(HostTierError, match="failed"):
        assert copies.num_come, "a leader that only looks hears of it too"
    copies.begin([2], [2], [a_copy(4)], to_host=False, number=4)
    copies.forget()
    assert copies.num_come == 0, "the pipeline ends without it"
    world.close()
