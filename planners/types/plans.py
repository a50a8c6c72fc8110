"""What planners decide. A plan is a frozen value with an id, the epoch it was made for, and an inverse."""

from dataclasses import dataclass, replace

from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.layout import Group, GroupKind, alone
from pengserve.planners.types.strategy import SwitchStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacePlan:
    """Fill the slots of dead instances again."""

    plan_id: str
    epoch: Epoch
    slots: tuple[InstanceId, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTarget:
    """A layout that a user asks for. It stays until the user asks for another. Instances in no group are alone (dp)."""

    groups: tuple[Group, ...]
    strategy: SwitchStrategy = SwitchStrategy.CARRY


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPlan:
    """Turn several groups into one, or back. The one primitive: any layout change is a row of these.

    To begin a pp group is a drop of parameters, to end it their restore (KunServe). The `parts` of a group may be
    narrower groups of its kind, of which it keeps what running requests have; but a tp group ends in its members alone.
    """

    plan_id: str
    epoch: Epoch  # of the layout it was made for; its members are at `epoch + 1` after it, the layout there or above
    group: Group  # that begins (merge, drop) or ends (split, restore)
    members: tuple[InstanceKey, ...]  # lives of `group.members`, in rank order; the first leads
    is_merge: bool
    parts: tuple[Group, ...] = ()  # that `group` is formed of, or ends in, in rank order; left out: each member alone
    strategy: SwitchStrategy = SwitchStrategy.CARRY
    why: str = ""
    drain_timeout_s: float = 30.0  # of sequential and soft: what has not finished then is carried

    def __post_init__(self) -> None:
        if self.group.kind is GroupKind.DP:
            raise ValueError(f"a switch is about a tp or pp group, not {self.group}")
        if tuple(key.instance_id for key in self.members) != self.group.members:
            raise ValueError(f"{self.members} are not the lives of {self.group}")
        if not self.parts:
            object.__setattr__(self, "parts", alone(self.group.members))
        if tuple(member for part in self.parts for member in part.members) != self.group.members:
            raise ValueError(f"{' '.join(map(str, self.parts))} are not the parts of {self.group}")
        if any(part.kind not in (GroupKind.DP, self.group.kind) or part == self.group for part in self.parts):
            raise ValueError(f"{self.group} is of dp groups, or of narrower {self.group.kind} groups")
        if self.verb == "split" and len(self.parts) < self.group.degree:
            raise ValueError(f"{self.group} ends in its members alone, not in {' '.join(map(str, self.parts))}")

    @property
    def before(self) -> tuple[Group, ...]:
        """The groups of the layout that it is made for."""
        return self.parts if self.is_merge else (self.group,)

    @property
    def after(self) -> tuple[Group, ...]:
        """The groups that stand in their place when it has been carried out."""
        return (self.group,) if self.is_merge else self.parts

    def is_apart(self, other: "SwitchPlan") -> bool:
        """Whether the two have no member in common, so that they may be carried out side by side."""
        return set(self.group.members).isdisjoint(other.group.members)

    @property
    def leader(self) -> InstanceKey:
        """The member that schedules for the group."""
        return self.members[0]

    def part_of(self, key: InstanceKey) -> Group:
        """The part that a member is in."""
        return next(part for part in self.parts if key.instance_id in part.members)

    def keys(self, part: Group) -> tuple[InstanceKey, ...]:
        """Lives of a part's members, in rank order."""
        return tuple(key for key in self.members if key.instance_id in part.members)

    @property
    def verb(self) -> str:
        """What people call it: "merge", "split", "drop" or "restore"."""
        if self.group.kind is GroupKind.PP:
            return "drop" if self.is_merge else "restore"
        return "merge" if self.is_merge else "split"

    @property
    def drains(self) -> bool:
        """Whether running requests end first."""
        return self.strategy is SwitchStrategy.SEQUENTIAL or (self.is_merge and self.strategy is SwitchStrategy.SOFT)

    @property
    def waits(self) -> bool:
        """Whether it may take `drain_timeout_s` longer: requests end first, or weights come back."""
        return self.drains or self.verb == "restore"

    def pauses(self, priority: int) -> bool:
        """Whether a running request of this priority waits in its dp lane until the group is split (hard)."""
        return self.verb == "merge" and self.strategy is SwitchStrategy.HARD and priority >= 0

    @property
    def inverse(self) -> "SwitchPlan":
        """The plan that undoes this one, for the epoch it leads to. A tp group ends in its members alone."""
        return replace(
            self,
            plan_id=f"{self.plan_id}^-1",
            epoch=Epoch(self.epoch + 1),
            is_merge=not self.is_merge,
            parts=() if self.verb == "merge" else self.parts,
            why="undo",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchReport:
    """How a committed switch went. Seconds are the leader's."""

    plan_id: str
    epoch: Epoch  # that its members are at; the layout it led to has this one, or one above
    drain_s: float = 0.0  # until the running requests had finished (sequential, soft)
    meet_s: float = 0.0  # until every member had reached a step boundary; the leader went on stepping meanwhile
    cutover_s: float = 0.0  # from the leader's last step in the old shape until it could step in the new one
    num_carried: int = 0  # requests that went on with their KV
    num_recomputed: int = 0  # running requests whose KV found no room, or was not wanted
    num_paused: int = 0  # requests of all members that wait in their dp lanes (hard)
    num_redirected: int = 0  # waiting requests that were sent to another instance
    carried_bytes: int = 0  # KV that went over the wire
