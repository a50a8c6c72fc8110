"""Ranks: neighbours in rank are neighbours in hardware."""

from itertools import permutations

from pengserve.planners.ranks import rank_order
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.snapshot import DeviceInfo, InstanceSnapshot, InstanceState


def placed(instance_id: int, node_id: str, device: str) -> InstanceSnapshot:
    key = InstanceKey(instance_id=InstanceId(instance_id), incarnation=1)
    return InstanceSnapshot(key=key, state=InstanceState.READY, device=DeviceInfo(node_id=node_id, device=device))


def test_orders_by_node_then_device_number_then_slot() -> None:
    instances = [
        placed(0, "b", "cuda:10"),
        placed(1, "", "cpu"),
        placed(2, "a", "cuda:1"),
        placed(3, "b", "cuda:2"),
        placed(4, "a", "cpu"),
        placed(5, "a", "cuda:0"),
        placed(6, "a", "cpu"),
    ]
    for some in permutations(instances, 7):
        assert rank_order(some) == (4, 6, 5, 2, 3, 0, 1)
        break
    assert {rank_order(some) for some in permutations(instances[:5])} == {(4, 2, 3, 0, 1)}


def test_each_node_is_one_run_of_ranks() -> None:
    instances = [placed(i, f"n{i % 3}", f"cuda:{i // 3}") for i in range(24)]
    nodes = [i % 3 for i in rank_order(instances)]
    assert nodes == sorted(nodes)
