"""Ranks: neighbours in rank are neighbours in hardware."""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.groups import groups_for
from pengserve.planners.ranks import rank_order
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.snapshot import DeviceInfo, InstanceSnapshot, InstanceState


def placed(instance_id: int, node_id: str, device: str, domain: str = "") -> InstanceSnapshot:
    key = InstanceKey(instance_id=InstanceId(instance_id), incarnation=1)
    found = DeviceInfo(node_id=node_id, device=device, domain=domain)
    return InstanceSnapshot(key=key, state=InstanceState.READY, device=found)


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


def of_domains(domains: list[str]) -> tuple[InstanceId, ...]:
    """Ranks on one node, where slot i is on device i, in this domain."""
    return rank_order(placed(i, "n", f"cuda:{i}", domain) for i, domain in enumerate(domains))


def test_pairs_with_a_bridge_are_neighbours() -> None:
    assert of_domains(["0", "1", "1", "0"]) == (0, 3, 1, 2)
    assert of_domains(["0"] * 8) == of_domains([""] * 8) == tuple(range(8)), "one domain keeps its order"


def test_uneven_domains_are_cut_so_that_only_what_is_left_over_meets() -> None:
    assert of_domains(list("aaabbbbb")) == (3, 4, 5, 6, 0, 1, 2, 7)


@given(st.lists(st.sampled_from("abc"), max_size=20))
def test_no_order_has_more_groups_within_domains(domains: list[str]) -> None:
    ranks = of_domains(domains)
    assert sorted(ranks) == list(range(len(domains)))
    for degree in (2, 4, 8, 16):
        groups = groups_for(ranks, dict.fromkeys(ranks, "n"), (degree,))
        within = [group for group in groups if len({domains[member] for member in group.members}) == 1]
        assert len(within) == sum(domains.count(name) // degree for name in "abc"), "as many as there can be"
