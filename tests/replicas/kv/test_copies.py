"""A copy ends, or what needs it hears that it cannot."""

import numpy as np
import pytest
import torch

from pengserve.planners.types.errors import HostTierError
from pengserve.replicas.kv.arrivals import Arrivals
from pengserve.replicas.kv.copies import Copy, CopyEngine, Priority, Sides
from tests.replicas.kv.tiered_world import TieredWorld


def a_copy(rows: int) -> Copy:
    """Of one block between two tensors; where there are too few rows, it fails."""
    ids = np.array([3])
    memory = [torch.zeros(count, 2, dtype=torch.int64) for count in (4, rows)]
    return Copy(Priority.BRING, 0, ids, ids, ids, to_host=False, sides=Sides(*memory))


def test_after_one_has_failed_none_waits_for_ever() -> None:
    world = TieredWorld(2, 4, 4, 2)
    engine: CopyEngine = world.tiers.engine
    arrivals = Arrivals(engine)
    arrivals.begin(1, [1], [1], [a_copy(4)])
    arrivals.wait_all()
    arrivals.begin(2, [1], [1], [a_copy(1)])
    with pytest.raises(HostTierError, match="failed"):
        arrivals.wait_for([1])
    arrivals.begin(3, [2], [2], [a_copy(4)])
    with pytest.raises(HostTierError, match="failed"):
        assert arrivals.num_come, "a leader that only looks hears of it too"
    arrivals.begin(4, [2], [2], [a_copy(4)])
    arrivals.forget()
    assert arrivals.num_come == 0, "the pipeline ends without it"
    world.close()
