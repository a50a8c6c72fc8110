"""How the instances are grouped: a layout is a tuple of groups and an epoch (design: layout, group)."""

from dataclasses import dataclass
from enum import StrEnum

from pengserve.planners.types.ids import Epoch, InstanceId


class GroupKind(StrEnum):
    """How the members of a group cooperate."""

    DP = "dp"
    TP = "tp"
    PP = "pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Instances that execute one lane together. `members` are in rank order; a `dp` group has one member."""

    kind: GroupKind
    members: tuple[InstanceId, ...]

    def __post_init__(self) -> None:
        if not self.members or len(set(self.members)) != len(self.members):
            raise ValueError(f"a group needs distinct members, got {self.members}")
        if (self.kind is GroupKind.DP) != (len(self.members) == 1):
            raise ValueError(f"a {self.kind} group cannot have {len(self.members)} member(s)")

    @property
    def leader(self) -> InstanceId:
        """The member that schedules for the group and talks to the ingress."""
        return self.members[0]

    @property
    def shape(self) -> str:
        """What the group runs: "dp", "tp2", "pp4", ..."""
        return self.kind.value if self.kind is GroupKind.DP else f"{self.kind}{len(self.members)}"

    def __str__(self) -> str:
        return f"{self.shape}@({','.join(map(str, self.members))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A partition of the instances into groups."""

    epoch: Epoch
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        members = [member for group in self.groups for member in group.members]
        if len(set(members)) != len(members):
            raise ValueError(f"an instance is in two groups: {sorted(members)}")

    @classmethod
    def all_dp(cls, instance_ids: tuple[InstanceId, ...], epoch: Epoch) -> "Layout":
        """Every instance alone: where each application begins."""
        return cls(epoch=epoch, groups=tuple(Group(kind=GroupKind.DP, members=(i,)) for i in sorted(instance_ids)))

    def group_of(self, instance_id: InstanceId) -> Group | None:
        """The group that `instance_id` is a member of, or None where it is in none."""
        return next((group for group in self.groups if instance_id in group.members), None)
