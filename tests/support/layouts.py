"""A law of layouts that many tests check."""

from collections.abc import Iterable

from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Layout


def check_layout(layout: Layout, instance_ids: Iterable[InstanceId]) -> tuple[str, ...]:
    """Whether each of `instance_ids` is in exactly one group of `layout`, and no other is."""
    expected = set(instance_ids)
    members = [member for group in layout.groups for member in group.members]
    found = [f"instance {i} is in no group" for i in sorted(expected - set(members))]
    found += [f"instance {i} is in a group and not in the cluster" for i in sorted(set(members) - expected)]
    found += [f"instance {i} is in {n} groups" for i in sorted(set(members)) if (n := members.count(i)) > 1]
    return tuple(found)
