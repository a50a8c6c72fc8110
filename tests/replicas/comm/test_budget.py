"""Laws of what groups' communicators take of a device: pipelines have rooms as they are made, and all shapes count."""

import pytest
import torch

from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.units import MIB
from pengserve.replicas.comm.budget import SUMS_BYTES, WAY_BYTES, communicator_bytes
from pengserve.replicas.comm.bulk import BulkWays
from pengserve.replicas.comm.torch_group import TorchCommunicator


def room_bytes(num_members: int) -> int:
    """Of the rooms that a member of a pipeline makes."""
    members = [InstanceKey(instance_id=InstanceId(slot), incarnation=0) for slot in range(num_members)]
    ways = BulkWays([TorchCommunicator("g", members, 0, 1.0, None) for _ in members], torch.device("cpu"))
    return sum(room.data.nbytes for landing in ways._landings.values() for room in landing._rooms)


@pytest.mark.parametrize(("num_stages", "rooms_mib"), [(2, 32), (4, 24), (8, 56)])
def test_a_pipelines_rooms_are_counted_as_they_are_made(num_stages: int, rooms_mib: int) -> None:
    narrower = communicator_bytes((), num_stages // 2)
    widest = communicator_bytes((), num_stages) - narrower
    assert widest == SUMS_BYTES + num_stages * WAY_BYTES + room_bytes(num_stages)
    assert room_bytes(num_stages) == rooms_mib * MIB


def test_each_degree_is_a_group_and_an_instance_alone_has_none() -> None:
    assert communicator_bytes((), 1) == 0
    assert communicator_bytes((2, 4, 8), 1) == 3 * SUMS_BYTES
    assert communicator_bytes((2,), 2) == SUMS_BYTES + communicator_bytes((), 2)
