"""Which groups of instances may cooperate: aligned runs of ranks inside one node (Flying Serving section 4.1)."""

from collections.abc import Iterable, Mapping, Sequence

from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind


def groups_for(
    ranks: Sequence[InstanceId], nodes: Mapping[InstanceId, str], degrees: Iterable[int]
) -> tuple[Group, ...]:
    """Every tp group that may be formed: for each node and degree p, runs of p neighbours that begin at a multiple of p.

    Groups of powers of two nest or are disjoint, so that any group can be split into halves. N instances have fewer
    than N of them. A node's remainder that is narrower than p is in no group of degree p.

    Args:
        ranks: instances in rank order (`planners.ranks`). Pass the slots that are being replaced too: a death then
            shifts no boundary, and the groups without it stay as they are.
        nodes: the node, or NVLink domain, of each. An instance without one is in no group.
        degrees: the degrees wanted; 1 and below are left out.

    Returns:
        Groups by degree, then by rank.
    """
    by_node: dict[str, list[InstanceId]] = {}
    for instance_id in ranks:
        if node := nodes.get(instance_id, ""):
            by_node.setdefault(node, []).append(instance_id)
    return tuple(
        Group(kind=GroupKind.TP, members=tuple(members[start : start + degree]))
        for degree in sorted({degree for degree in degrees if degree > 1})
        for members in by_node.values()
        for start in range(0, len(members) - degree + 1, degree)
    )
