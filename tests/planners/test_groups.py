"""Laws of group topology: groups stay in a node, are aligned runs, nest, and there are fewer of them than instances."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.groups import expand, groups_for, likely_groups, pipelines_for
from pengserve.planners.ranks import rank_order
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.layout import Group, GroupKind, Layout, degree_of, parse_groups, tensor_degree_of
from pengserve.planners.types.snapshot import DeviceInfo, InstanceSnapshot, InstanceState

DEGREES = (2, 4, 8, 16)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[tuple[InstanceId, ...], dict[InstanceId, str]]:
    """Slots in a shuffled rank order, each node's slots in one run."""
    sizes = draw(st.lists(st.integers(1, 20), max_size=5))
    slots = draw(st.permutations(range(sum(sizes))))
    names = [f"node{i}" for i, size in enumerate(sizes) for _ in range(size)]
    ranks = tuple(InstanceId(slot) for slot in slots)
    return ranks, dict(zip(ranks, names, strict=True))


def test_four_instances_of_one_node() -> None:
    ranks = tuple(map(InstanceId, range(4)))
    groups = groups_for(ranks, dict.fromkeys(ranks, "a"), (4, 2, 1, 2))
    assert list(map(str, groups)) == ["tp2@(0,1)", "tp2@(2,3)", "tp4@(0,1,2,3)"]


def test_a_group_never_crosses_nodes_and_an_unplaced_instance_is_in_none() -> None:
    ranks = tuple(map(InstanceId, range(6)))
    nodes = dict(zip(ranks, ("a", "a", "a", "b"), strict=False))
    assert list(map(str, groups_for(ranks, nodes, (2,)))) == ["tp2@(0,1)"]


def test_plain_processes_share_a_node_without_a_name() -> None:
    ranks = tuple(map(InstanceId, range(2)))
    assert list(map(str, groups_for(ranks, dict.fromkeys(ranks, ""), (2,)))) == ["tp2@(0,1)"]


@given(clusters())
def test_groups_are_aligned_runs_of_their_node(cluster: tuple[tuple[InstanceId, ...], dict[InstanceId, str]]) -> None:
    ranks, nodes = cluster
    for group in groups_for(ranks, nodes, DEGREES):
        node = nodes[group.members[0]]
        local = [instance_id for instance_id in ranks if nodes[instance_id] == node]
        start = local.index(group.members[0])
        assert start % len(group.members) == 0
        assert tuple(local[start : start + len(group.members)]) == group.members


@given(clusters())
def test_groups_nest_or_are_disjoint(cluster: tuple[tuple[InstanceId, ...], dict[InstanceId, str]]) -> None:
    groups = [set(group.members) for group in groups_for(*cluster, DEGREES)]
    assert all(a <= b or b <= a or not a & b for a in groups for b in groups)


@given(clusters())
def test_there_are_fewer_groups_than_instances(
    cluster: tuple[tuple[InstanceId, ...], dict[InstanceId, str]],
) -> None:
    ranks, nodes = cluster
    assert len(groups_for(ranks, nodes, DEGREES)) < max(1, len(ranks))


@given(clusters())
def test_every_instance_with_enough_neighbours_is_in_a_group(
    cluster: tuple[tuple[InstanceId, ...], dict[InstanceId, str]],
) -> None:
    ranks, nodes = cluster
    for degree in DEGREES:
        grouped = [i for group in groups_for(ranks, nodes, (degree,)) for i in group.members]
        sizes = [sum(nodes[i] == node for i in ranks) for node in set(nodes.values())]
        assert len(grouped) == len(set(grouped)) == sum(size // degree * degree for size in sizes)


@given(clusters(), st.sampled_from([1, 2, 3, 4, 8]))
def test_pipelines_are_aligned_runs_of_all_ranks_over_nodes_too(
    cluster: tuple[tuple[InstanceId, ...], dict[InstanceId, str]], max_stages: int
) -> None:
    ranks, _ = cluster
    groups = pipelines_for(ranks, ranks, max_stages)
    expected = {ranks[i : i + s] for s in (2, 4, 8) if s <= max_stages for i in range(0, len(ranks) - s + 1, s)}
    assert {group.members for group in groups} == expected
    assert len(groups) == len(expected) and all(group.kind is GroupKind.PP for group in groups)


@given(clusters(), st.sets(st.integers(0, 99)))
def test_an_instance_without_a_place_is_in_no_pipeline(
    cluster: tuple[tuple[InstanceId, ...], dict[InstanceId, str]], lost: set[int]
) -> None:
    ranks, _ = cluster
    groups = pipelines_for(ranks, [i for i in ranks if i not in lost], 4)
    assert not {member for group in groups for member in group.members} & lost


FIVE = tuple(map(InstanceId, range(5)))
GROUPS = groups_for(FIVE, dict.fromkeys(FIVE, ""), (2, 4))


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("dp", "dp@(0) dp@(1) dp@(2) dp@(3) dp@(4)"),
        ("tp2", "tp2@(0,1) tp2@(2,3) dp@(4)"),
        ("TP4", "tp4@(0,1,2,3) dp@(4)"),
        ("tp", "tp4@(0,1,2,3) dp@(4)"),
        ("tp2@(2,3) dp@(4)", "dp@(0) dp@(1) tp2@(2,3) dp@(4)"),
        (" tp4@( 0..3 ); dp@(4)", "tp4@(0,1,2,3) dp@(4)"),
    ],
)
def test_a_text_names_a_layout(text: str, layout: str) -> None:
    assert " ".join(map(str, expand(text, GROUPS, FIVE))) == layout


BOTH = GROUPS + pipelines_for(FIVE, FIVE, 4)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("pp2", "pp2@(0,1) pp2@(2,3) dp@(4)"),
        ("pp", "pp4@(0,1,2,3) dp@(4)"),
        ("tp", "tp4@(0,1,2,3) dp@(4)"),
        ("tp2@(0,1) pp2@(2,3)", "tp2@(0,1) pp2@(2,3) dp@(4)"),
        ("PP4@(0..3)", "pp4@(0,1,2,3) dp@(4)"),
    ],
)
def test_a_text_names_pipelines_as_it_names_tp_groups(text: str, layout: str) -> None:
    assert " ".join(map(str, expand(text, BOTH, FIVE))) == layout


@pytest.mark.parametrize("text", ["pp8", "pp2@(1,2)", "pp2@(0,1) tp2@(0,1)"])
def test_a_pipeline_that_is_not_possible_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"choose dp, tp2, tp4, pp2, pp4, or groups of tp2@\(0,1\)|twice"):
        expand(text, BOTH, FIVE)


def test_without_pipelines_none_is_named() -> None:
    with pytest.raises(ValueError, match="choose dp, tp2, tp4, or"):
        expand("pp", GROUPS, FIVE)


@pytest.mark.parametrize(
    "text", ["", "tp8", "tp2@(1,2)", "dp@(9)", "tp3@(0,1)", "tp2@(0,1) tp4@(0..3)", "two", "dp dp"]
)
def test_what_is_not_possible_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"choose dp, tp2, tp4, or groups of tp2@\(0,1\)|must be the same|twice"):
        expand(text, GROUPS, FIVE)


@given(clusters(), st.data())
def test_an_expanded_layout_has_each_instance_once_and_reads_back(
    cluster: tuple[tuple[InstanceId, ...], dict[InstanceId, str]], data: st.DataObject
) -> None:
    ranks, nodes = cluster
    groups = groups_for(ranks, nodes, DEGREES)
    text = data.draw(st.sampled_from(["dp", *{group.shape for group in groups}, *map(str, groups)]))
    layout = expand(text, groups, ranks)
    Layout(epoch=Epoch(0), groups=layout)
    assert sorted(member for group in layout for member in group.members) == sorted(ranks)
    assert parse_groups(" ".join(map(str, layout))) == layout
    if ranks:
        assert expand(" ".join(map(str, layout)), groups, ranks) == layout


@given(clusters())
def test_a_group_reads_back_and_its_shape_tells_its_degree(
    cluster: tuple[tuple[InstanceId, ...], dict[InstanceId, str]],
) -> None:
    for group in groups_for(*cluster, DEGREES):
        assert Group.parse(str(group)) == group
        assert degree_of(group.shape) == group.degree


@pytest.mark.parametrize(("shape", "degree"), [("dp", 1), ("tp2", 2), ("tp8", 8), ("pp2", 1), ("pp8", 1)])
def test_only_tensor_parallelism_shares_a_layer(shape: str, degree: int) -> None:
    assert tensor_degree_of(shape) == degree
    size = degree_of(shape)
    group = Group.parse(f"{shape}@({','.join(map(str, range(size)))})")
    assert (group.tensor_degree, group.degree) == (degree, size)


@pytest.mark.parametrize(
    "text", ["tp2@(0,1", "tp2", "dp2@(0)", "tp@(0,1)", "tp2@(1..0)", "tp2@(0;1)", "dp@()", "dp@(-1)"]
)
def test_what_is_no_group_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"group|member|instance|upwards"):
        Group.parse(text)


@given(st.integers(1, 40), st.sets(st.sampled_from(DEGREES)), st.sampled_from([1, 2, 3, 4, 8]))
def test_on_one_node_with_slots_in_order_an_instances_likely_groups_are_its_groups(
    count: int, degrees: set[int], max_stages: int
) -> None:
    ranks = tuple(map(InstanceId, range(count)))
    found = (*groups_for(ranks, dict.fromkeys(ranks, "a"), degrees), *pipelines_for(ranks, ranks, max_stages))
    for instance_id in ranks:
        likely = likely_groups(instance_id, degrees, max_stages)
        assert [group for group in likely if max(group.members) < count] == [
            group for group in found if instance_id in group.members
        ]


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=8),
    st.integers(1, 3),
    st.sets(st.sampled_from(DEGREES)),
    st.sampled_from([1, 2, 4, 8]),
)
def test_on_nodes_that_are_alike_an_instances_likely_groups_are_those_of_its_domain(
    domains: list[str], num_nodes: int, degrees: set[int], max_stages: int
) -> None:
    """Nodes of some devices, an instance on each, as the controller orders them by their links."""
    count = num_nodes * len(domains)
    instances = [
        InstanceSnapshot(
            key=InstanceKey(instance_id=InstanceId(slot), incarnation=0),
            state=InstanceState.READY,
            device=DeviceInfo(
                node_id=f"node-{slot // len(domains)}",
                device=f"cuda:{slot % len(domains)}",
                domain=domains[slot % len(domains)],
            ),
        )
        for slot in range(count)
    ]
    ranks, nodes = rank_order(instances), {i.instance_id: i.device.node_id for i in instances}
    found = (*groups_for(ranks, nodes, degrees), *pipelines_for(ranks, ranks, max_stages))
    for instance_id in ranks:
        likely = likely_groups(instance_id, degrees, max_stages, domains)
        assert [group for group in likely if max(group.members) < count] == [
            group for group in found if instance_id in group.members
        ]
