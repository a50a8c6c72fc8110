"""How much of a processor each instance of a machine has."""

import pytest

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.directory import PeerAddress, PeerDirectory
from pengserve.planners.types.ids import InstanceId, InstanceKey, Version
from pengserve.replicas.processors import processors_each


@pytest.mark.parametrize(
    ("device", "threads", "cores", "instances", "each"),
    [
        ("cpu", 1, 2, 4, 0.5),
        ("cpu", 1, 2, 2, 1.0),
        ("cpu", 1, 64, 2, 1.0),
        ("cpu", 16, 64, 8, 0.5),
        ("cpu", 1, 2, 0, 1.0),
        ("cuda", 1, 2, 8, 1.0),
    ],
)
def test_instances_share_the_cores_of_a_machine_and_no_gpu(
    device: str, threads: int, cores: int, instances: int, each: float
) -> None:
    config = InstanceConfig(app="tests", model="m", device=device, cpu_threads=threads)
    assert processors_each(config, cores, instances) == each


def test_a_directory_tells_who_runs_on_the_same_machine() -> None:
    keys = [InstanceKey(instance_id=InstanceId(i), incarnation=0) for i in range(4)]
    endpoints = ["10.0.0.1:1", "10.0.0.1:2", "[fe80::1]:3"]
    peers = tuple(PeerAddress(key=key, endpoint=at) for key, at in zip(keys, endpoints, strict=False))
    directory = PeerDirectory(version=Version(term=1, counter=0), peers=peers, groups=())
    assert [directory.num_beside(key) for key in keys] == [2, 2, 1, 0]
