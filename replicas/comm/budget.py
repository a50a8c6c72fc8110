"""What the communicators of an instance's groups take of a device, so that weights and KV leave it free.

Groups meet after weights and KV have taken the device's memory. How much NCCL takes follows from its sources (2.2x):
for each channel and each member that it is connected with, 4 MiB for large messages, 4.7 MiB for middle ones and
0.5 MiB for small ones. It has not been measured between two GPUs.
"""

from collections.abc import Iterable

from pengserve.planners.types.units import MIB
from pengserve.replicas.comm.bulk import PIECE_BYTES, rooms_each

SUMS_BYTES = 256 * MIB  # of the communicator of a group's steps: a ring of 24 channels, and some
WAY_BYTES = 40 * MIB  # of one for bulk, which has four channels


def communicator_bytes(degrees: Iterable[int], max_stages: int) -> int:
    """Bytes of an instance that is in one group of each shape, with NCCL.

    Args:
        degrees: of tensor-parallel groups.
        max_stages: of pipelines, which have 2, 4, 8, ... stages.
    """
    stages = (1 << power for power in range(1, max_stages.bit_length()))
    return sum(SUMS_BYTES for _ in degrees) + sum(map(_pipeline_bytes, stages))


def _pipeline_bytes(num_stages: int) -> int:
    """Of one pipeline: its steps' communicator, and one for each sender of bulk with rooms for what comes."""
    rooms = (num_stages - 1) * rooms_each(num_stages)
    return SUMS_BYTES + num_stages * WAY_BYTES + rooms * PIECE_BYTES
