"""How the instances are grouped: a layout is a tuple of groups and an epoch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from pengserve.planners.types.ids import Epoch, InstanceId

_GROUP = re.compile(r"(dp|tp|pp)(\d*)@\(([\d\s,.]*)\)")  # "tp2@(0,1)"
_SHAPE = re.compile(r"dp|(?:tp|pp)(\d+)")
_MEMBERS = re.compile(r"(\d+)(?:\.\.(\d+))?")  # "3", or "0..3" with both ends
_WORD = re.compile(r"[^\s;(]+(?:\([^)]*\)?)?")  # spaces inside the brackets belong to the word
_MAX_MEMBERS = 1024  # of a group that is read from text: "0..999999999" must not fill the memory


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
        degree = len(self.members)
        return "dp" if degree == 1 else self.kind + str(degree)  # without asking the enum, which is slow

    @property
    def degree(self) -> int:
        """How many instances cooperate; 1 for `dp`."""
        return len(self.members)

    @property
    def tensor_degree(self) -> int:
        """How many instances compute each layer together; 1 for `dp` and `pp`."""
        return len(self.members) if self.kind is GroupKind.TP else 1

    def __hash__(self) -> int:
        return hash(self.members)  # two kinds of group over the same members are rare, and the enum's hash is slow

    def __str__(self) -> str:
        return _name(self.shape, self.members)

    @classmethod
    def parse(cls, text: str) -> "Group":
        """The group that `str` shows so, e.g. "dp@(2)", "tp2@(0,1)"; "tp4@(0..3)" is short for "tp4@(0,1,2,3)".

        Raises:
            ValueError: the text has another form, or its degree is not the number of its members.
        """
        found = _GROUP.fullmatch(text.strip())
        if found is None:
            raise ValueError(f'"{text}" is no group: write it like dp@(2) or tp2@(0,1)')
        members = _parse_members(found[3])
        if (found[1] != GroupKind.DP or found[2]) and found[2] != str(len(members)):
            raise ValueError(f'"{text}" names {len(members)} member(s): the number after {found[1]} must be the same')
        return cls(kind=GroupKind(found[1]), members=members)


@lru_cache(maxsize=1 << 14)
def _name(shape: str, members: tuple[InstanceId, ...]) -> str:
    """E.g. "tp2@(0,1)". Kept, since a controller compares the names of all groups in each tick."""
    return f"{shape}@({','.join(map(str, members))})"


def alone(members: Iterable[InstanceId]) -> tuple[Group, ...]:
    """A dp group of each."""
    return tuple(Group(kind=GroupKind.DP, members=(member,)) for member in members)


def degree_of(shape: str) -> int:
    """How many instances run `shape` together: `"dp" -> 1`, `"tp4" -> 4`.

    Raises:
        ValueError: no such shape.
    """
    found = _SHAPE.fullmatch(shape)
    if found is None:
        raise ValueError(f'"{shape}" is no shape: write dp, tp2, tp4, ...')
    return int(found[1] or 1)


def tensor_degree_of(shape: str) -> int:
    """How many instances compute each layer of `shape` together: `"tp4" -> 4`, `"dp" -> 1`, `"pp2" -> 1`.

    Raises:
        ValueError: no such shape.
    """
    degree = degree_of(shape)
    return degree if shape.startswith(GroupKind.TP) else 1


def parse_groups(text: str) -> tuple[Group, ...]:
    """The groups of a text like "tp2@(0,1) dp@(2)", separated by spaces or semicolons.

    Raises:
        ValueError: a word is no group, or an instance is in two of them.
    """
    groups = tuple(Group.parse(word) for word in _WORD.findall(text))
    members = [member for group in groups for member in group.members]
    if len(set(members)) != len(members):
        raise ValueError(f'"{text}" names an instance twice: each instance can be in one group')
    return groups


def _parse_members(text: str) -> tuple[InstanceId, ...]:
    members: list[InstanceId] = []
    for part in text.split(","):
        found = _MEMBERS.fullmatch(part.strip())
        if found is None:
            raise ValueError(f'"{text}" are no members: write instance ids like 0,1 or 0..3')
        first, last = int(found[1]), int(found[2] or found[1])
        if not 0 <= last - first < _MAX_MEMBERS:
            raise ValueError(f'"{part.strip()}" must count upwards, over at most {_MAX_MEMBERS} instances')
        members += [InstanceId(i) for i in range(first, last + 1)]
    return tuple(members)


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
