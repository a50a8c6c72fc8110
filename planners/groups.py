"""Which groups of instances may cooperate, and how people name a layout of them.

Tensor-parallel groups are aligned runs of ranks inside one node (Flying Serving section 4.1). Pipelines are aligned
runs of ranks that may span nodes: what their stages exchange is small (KunServe section 3).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from pengserve.planners.ranks import by_domain
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind, parse_groups


def groups_for(
    ranks: Sequence[InstanceId],
    nodes: Mapping[InstanceId, str],
    degrees: Iterable[int],
    kind: GroupKind = GroupKind.TP,
) -> tuple[Group, ...]:
    """Every group that may be formed: for each node and degree p, runs of p neighbours from a multiple of p on.

    Groups of powers of two nest or are disjoint, so that any group can be split into halves. N instances have fewer
    than N of them. A node's remainder that is narrower than p is in no group of degree p.

    Args:
        ranks: instances in rank order (`planners.ranks`): neighbours have the best links. Pass the slots that are being
            replaced too: a death then shifts no boundary, and the groups without it stay as they are.
        nodes: the node of each. An instance that is not listed is in no group; the empty name is a node like any other
            (plain processes of one machine).
        degrees: the degrees wanted; 1 and below are left out.
        kind: of the groups.

    Returns:
        Groups by degree, then by rank.
    """
    by_node: dict[str, list[InstanceId]] = {}
    for instance_id in ranks:
        if (node := nodes.get(instance_id)) is not None:
            by_node.setdefault(node, []).append(instance_id)
    return tuple(
        Group(kind=kind, members=tuple(members[start : start + degree]))
        for degree in sorted({degree for degree in degrees if degree > 1})
        for members in by_node.values()
        for start in range(0, len(members) - degree + 1, degree)
    )


def pipelines_for(ranks: Sequence[InstanceId], placed: Iterable[InstanceId], max_stages: int) -> tuple[Group, ...]:
    """Every pp group of at most `max_stages` that may be formed, of the instances whose place is known.

    As `groups_for`, as if all `placed` were on one node.
    """
    stages = (1 << power for power in range(1, max_stages.bit_length()))
    return groups_for(ranks, dict.fromkeys(placed, ""), stages, GroupKind.PP)


def likely_groups(
    instance_id: InstanceId, degrees: Collection[int], max_stages: int, domains: Sequence[str] = ()
) -> tuple[Group, ...]:
    """The groups that an instance will be in where slots are numbered node by node, and on a node as its devices are.

    Args:
        domains: of the devices of a node, in their order; all nodes are alike. Empty: slots are in rank order.
    """
    # A rank may lie anywhere on its node, and a group of it may begin there and end on the next ones.
    num_slots = instance_id + max([max_stages, *degrees], default=1) + len(domains)
    num_devices = len(domains) or num_slots
    ranks: list[InstanceId] = []
    nodes: dict[InstanceId, str] = {}
    for first in range(0, num_slots, num_devices):
        for device in by_domain(range(num_devices), lambda device: domains[device] if domains else ""):
            ranks.append(InstanceId(first + device))
            nodes[ranks[-1]] = str(first)
    found = (*groups_for(ranks, nodes, degrees), *pipelines_for(ranks, ranks, max_stages))
    return tuple(group for group in found if instance_id in group.members)


def expand(text: str, groups: Sequence[Group], ranks: Sequence[InstanceId] = ()) -> tuple[Group, ...]:
    """The layout that `text` asks for, of tp and pp groups among `groups` and dp groups.

    "dp" is every instance alone; "tp2" every aligned pair, and the rest alone; "tp" the same with the widest degree
    there is; "pp2" and "pp" are pipelines likewise; "tp2@(0,1) dp@(2)" names groups, and instances it does not name
    are alone. `ranks` are the instances to lay out; without it, those that `groups` name.

    Raises:
        ValueError: the text has another form, or names what is not possible; the sentence lists what is.
    """
    known = tuple(dict.fromkeys(ranks)) or tuple(sorted({member for group in groups for member in group.members}))
    possible: dict[str, list[Group]] = {}
    for group in groups:
        possible.setdefault(group.shape, []).append(group)
    wanted_shape = text.strip().lower()
    of_kind = [shape for shape, same in possible.items() if same[0].kind == wanted_shape]
    if of_kind:
        wanted_shape = max(of_kind, key=lambda shape: possible[shape][0].degree)
    if wanted_shape == GroupKind.DP:
        wanted: tuple[Group, ...] = ()
    elif wanted_shape in possible:
        wanted = tuple(possible[wanted_shape])
    elif "@" in wanted_shape:
        wanted = parse_groups(wanted_shape)
    else:
        raise ValueError(f'"{text}" is not possible here: {_choices(possible)}')
    for group in wanted:
        is_possible = group.members[0] in known if group.kind is GroupKind.DP else group in groups
        if not is_possible:
            raise ValueError(f"{group} is not possible here: {_choices(possible)}")
    return complete(wanted, known)


def complete(groups: Iterable[Group], ranks: Sequence[InstanceId]) -> tuple[Group, ...]:
    """`groups` and a dp group of each instance of `ranks` that is in none of them, by rank of the leaders."""
    leader_of = {member: group for group in groups for member in group.members}
    alone = {i: leader_of.get(i) or Group(kind=GroupKind.DP, members=(i,)) for i in ranks}
    return tuple(dict.fromkeys(alone.values()))


def _choices(possible: Mapping[str, Sequence[Group]], most: int = 8) -> str:
    """E.g. "choose dp, tp2, or groups of tp2@(0,1) tp2@(2,3)"."""
    if not possible:
        return "choose dp; no group of several instances is ready"
    named = [str(group) for groups in possible.values() for group in groups]
    more = f" and {len(named) - most} more" if len(named) > most else ""
    return f"choose {', '.join(['dp', *possible])}, or groups of {' '.join(named[:most])}{more}"
