"""How loaded each group is, and how loaded one would be that does not exist yet.

The load of a shape is measured in that shape: a merge is judged by the load that the merged group would have, and a
split by the load that it has. So a merge cannot by itself call for the split that undoes it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pengserve.planners.columns import GroupTable, Kept, ReadyInstances, ready_instances, whole_groups
from pengserve.planners.columns import lane_capacity as lane_capacity
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind, alone
from pengserve.planners.types.snapshot import (
    ClusterSnapshot,
    InstanceSnapshot,
    KvCapacity,
)
from pengserve.planners.types.units import blocks_for

OVERLOAD = 1.0  # from this load on, requests wait or will


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """Load of one group at one moment. Shares are of what its shape can hold, and may exceed 1."""

    num_requests: int  # running and waiting
    num_waiting: int
    kv_share: float  # virtual: resident, and what the queue will need
    slot_share: float  # requests per slot; a slot more than `busy_requests` per member does not count
    is_known: bool = True  # False where the newest stats are not of this shape yet
    is_queue: bool = False  # more wait than arrived just now

    @property
    def load(self) -> float:
        """The worst of the shares; at least `OVERLOAD` where requests queue."""
        load = max(self.kv_share, self.slot_share)
        return max(load, OVERLOAD) if self.is_queue else load


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """A snapshot, indexed: what the planner asks again and again."""

    snapshot: ClusterSnapshot
    instances: ReadyInstances
    table: GroupTable  # of the layout's groups whose members are all READY
    group_of: Mapping[InstanceId, Group]  # of instances in groups whose members are all READY
    loads: "Loads"  # of those groups, by leader
    tp_groups: tuple[Group, ...]  # that could be formed now, and those that stand
    formable: "Formable"
    busy_requests: int

    @classmethod
    def of(cls, snapshot: ClusterSnapshot, busy_requests: int, queues: Iterable[InstanceId] = ()) -> "ClusterView":
        """The view of `snapshot`; `queues` are leaders whose queue has stood for long enough to count."""
        instances = ready_instances(snapshot.instances)
        table, formable = whole_groups(snapshot.layout.groups, instances), formable_groups(snapshot.groups)
        return cls(
            snapshot=snapshot,
            instances=instances,
            table=table,
            group_of=table.group_of,
            loads=Loads(table, instances, busy_requests, frozenset(queues)),
            tp_groups=formable.tp_groups,
            formable=formable,
            busy_requests=max(1, busy_requests),
        )

    def can_form(self, group: Group) -> bool:
        """Whether the lanes and communicators for `group` are ready."""
        return group in self.formable

    def load(self, group: Group) -> GroupLoad:
        """Load of a group that is in the layout, with all members READY."""
        return self.loads[group.leader]

    def is_known(self, group: Group) -> bool:
        """Whether the load of such a group is known, see `GroupLoad.is_known`: as `load` says, and cheaper."""
        leader = self.instances[group.members[0]]
        return leader.stats.shape == group.shape and lane_capacity(leader, group.shape) is not None

    def groups(self) -> Iterator[Group]:
        """The layout's groups whose members are all READY."""
        return (group for group in self.snapshot.layout.groups if group.members[0] in self.loads)

    def groups_over(self, members: Iterable[InstanceId]) -> tuple[Group, ...]:
        """The layout's groups that have any of `members`, by rank; only those whose members are all READY."""
        groups = [self.group_of[member] for member in members if member in self.group_of]
        return tuple({group.members[0]: group for group in groups}.values())

    def projected(self, group: Group) -> GroupLoad | None:
        """Load that the tp `group` would have if it were formed now of all that its members run.

        None where its members also cooperate with others, or as a pipeline, or it cannot be built.
        """
        lane = lane_capacity(self.instances.get(group.members[0]), group.shape)
        if lane is None:
            return None
        members, degree = group.members, len(group.members)
        num_requests = num_waiting = start = 0
        kv_share, is_known, is_queue = 0.0, True, False
        while start < degree:
            part = self.group_of.get(members[start])
            if part is None or part.kind is GroupKind.PP or part.members != members[start : start + part.degree]:
                return None
            load, width = self.loads[members[start]], len(part.members)
            num_requests += load.num_requests
            num_waiting += load.num_waiting
            kv_share += load.kv_share * width
            is_known, is_queue = is_known and load.is_known, is_queue or load.is_queue
            start += width
        return GroupLoad(
            num_requests=num_requests,
            num_waiting=num_waiting,
            kv_share=kv_share / degree,
            slot_share=num_requests / num_slots(lane, degree, self.busy_requests),
            is_known=is_known,
            is_queue=is_queue,
        )

    def max_tokens(self, group: Group, shape: str) -> int:
        """Most tokens of a request that every member of `group` can have in `shape`; 0 where one cannot run it."""
        least: int | None = None
        for member in group.members:
            lane = lane_capacity(self.instances.get(member), shape)
            if lane is None:
                return 0
            least = lane.max_model_len if least is None else min(least, lane.max_model_len)
        return least or 0

    def needs_group(self, group: Group) -> bool:
        """Whether a request runs in `group` that none of its members could hold alone."""
        return self.longest_tokens(group) > self.max_tokens(group, GroupKind.DP)

    def longest_tokens(self, group: Group) -> int:
        """Tokens of the longest request that runs in `group` now."""
        leader = self.instances.get(group.leader)
        return 0 if leader is None else leader.stats.longest_tokens

    def num_paused(self, group: Group) -> int:
        """Requests that wait in lanes of `group`'s members while others run."""
        num_paused = self.instances.stat("num_paused")
        return sum(int(num_paused[m]) for m in group.members if m < self.instances.size)


def part_capacity(instances: Mapping[InstanceId, InstanceSnapshot], part: Group) -> KvCapacity | None:
    """What `part` would hold, which is what its narrowest member can; None where one cannot run it."""
    lanes = [lane_capacity(instances.get(member), part.shape) for member in part.members]
    known = [lane for lane in lanes if lane is not None]
    return min(known, key=lambda lane: (lane.num_blocks, lane.max_model_len)) if len(known) == len(lanes) else None


def fits_alone(
    group: Group,
    instances: Mapping[InstanceId, InstanceSnapshot],
    num_blocks: int | None = None,
    fill: float = 1.0,
    parts: Sequence[Group] = (),
) -> bool:
    """Whether what runs in the pipeline `group` surely fits into its members' dp lanes, for any lengths of requests.

    Of requests of at most L blocks, given one after the other to the member with most room, one finds none only where
    each member has less than L left. False where a member is missing, or the leader's stats are of another shape.

    Args:
        num_blocks: what must fit, where that is not what running requests hold.
        fill: share of a lane that may be used.
        parts: what the pipeline ends in, where that is not each member alone.
    """
    leader = instances.get(group.leader)
    lanes = [part_capacity(instances, part) for part in parts or alone(group.members)]
    room = [int(fill * lane.num_blocks) for lane in lanes if lane is not None]
    if leader is None or len(room) < len(lanes) or leader.stats.shape != group.shape:
        return False
    block_size = leader.stats.block_size or min(lane.block_size for lane in lanes if lane is not None)
    longest = blocks_for(leader.stats.longest_tokens, max(1, block_size))
    needed = leader.stats.kv_blocks_used if num_blocks is None else num_blocks
    return longest <= min(room) and needed <= sum(room) - (len(room) - 1) * longest


class Loads(Mapping[InstanceId, GroupLoad]):
    """Load of each group by leader; made when it is asked for, since few of a thousand are."""

    def __init__(
        self,
        table: GroupTable,
        instances: Mapping[InstanceId, InstanceSnapshot],
        busy_requests: int,
        queues: frozenset[InstanceId],
    ) -> None:
        self._table, self._instances, self._busy_requests, self.queues = table, instances, busy_requests, queues
        self._made: dict[InstanceId, GroupLoad] = {}

    def __getitem__(self, leader: InstanceId) -> GroupLoad:
        if leader not in self._made:
            group = self._table.group_of[leader]
            if group.members[0] != leader:
                raise KeyError(leader)
            self._made[leader] = _load(self._instances[leader], group, self._busy_requests, leader in self.queues)
        return self._made[leader]

    def __contains__(self, leader: object) -> bool:
        return leader in self._table.leader_set

    def __iter__(self) -> Iterator[InstanceId]:
        return iter(self._table.leaders)

    def __len__(self) -> int:
        return len(self._table.leaders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formable:
    """The groups that could be formed now, sorted out."""

    tp_groups: tuple[Group, ...]
    tp_degrees: tuple[int, ...]  # of these, each once, growing
    members: Mapping[GroupKind, frozenset[tuple[InstanceId, ...]]]

    def __contains__(self, group: Group) -> bool:
        return group.members in self.members.get(group.kind, ())

    @classmethod
    def of(cls, groups: tuple[Group, ...]) -> "Formable":
        """The tp and pp groups among `groups`."""
        by_kind = {k: tuple(g for g in groups if g.kind is k) for k in (GroupKind.TP, GroupKind.PP)}
        members = {kind: frozenset(g.members for g in found) for kind, found in by_kind.items()}
        tp_groups = by_kind[GroupKind.TP]
        return cls(tp_groups=tp_groups, tp_degrees=tuple(sorted({g.degree for g in tp_groups})), members=members)


formable_groups = Kept(Formable.of)


def _load(leader: InstanceSnapshot, group: Group, busy_requests: int, is_queue: bool) -> GroupLoad:
    stats, lane = leader.stats, lane_capacity(leader, group.shape)
    num_requests = stats.num_running + stats.num_waiting
    if lane is None or stats.shape != group.shape:
        return GroupLoad(
            num_requests=num_requests, num_waiting=stats.num_waiting, kv_share=0.0, slot_share=0.0, is_known=False
        )
    block_size = stats.block_size or lane.block_size
    blocks = stats.kv_blocks_used + blocks_for(stats.queued_tokens, max(1, block_size))
    return GroupLoad(
        num_requests=num_requests,
        num_waiting=stats.num_waiting,
        kv_share=blocks / max(1, stats.kv_blocks_total or lane.num_blocks),
        slot_share=num_requests / num_slots(lane, group.degree, busy_requests),
        is_queue=is_queue or stats.num_waiting > group.degree,
    )


def num_slots(lane: KvCapacity, degree: int, busy_requests: int) -> int:
    """Requests that are load 1 in a group of that degree."""
    return max(1, min(lane.max_num_seqs, busy_requests * degree))
