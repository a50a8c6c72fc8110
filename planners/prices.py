"""What a change of the layout costs: seconds that requests stall, added up over all requests.

    moving    requests that run in a group stall while their KV goes from member to member
    waiting   requests that find no memory wait until the layout is judged anew, `min_dwell_s` at least

A price is that of the cluster with the change: what it stalls, and what waits all the same. Both are estimates from
counts of blocks; they rank options, and predict no latency.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pengserve.planners.drop import Pipeline
from pengserve.planners.overload import GroupDemand, MemoryDemand, group_demand
from pengserve.planners.types.config import DropConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceState


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices for one look."""

    config: DropConfig
    by_member: Mapping[InstanceId, GroupDemand] = field(default_factory=dict)
    keep_s: float = 0.0  # of leaving the layout as it is: requests wait where memory is short

    @classmethod
    def of(cls, demand: MemoryDemand, config: DropConfig) -> "Prices":
        """The prices where memory is short as `demand` says."""
        return cls(config=config, by_member=demand.by_member, keep_s=_keep_s(demand, config))

    def switch_s(self, group: Group) -> float:
        """Of a merge, split or restore of `group`: its requests move, and those that wait elsewhere go on waiting.

        Parameters that come back in a restore stall no request: they arrive while the group serves.
        """
        return self.keep_s + self._moving_s(group)

    def drop_s(self, pipeline: Pipeline) -> float:
        """Of a drop: as `switch_s`, and fewer wait, since its members have more memory."""
        parts = self._parts(pipeline.group)
        before_s = sum(self._waiting_alone_s(part) for part in parts)  # none waits in one that is not overloaded
        return self.switch_s(pipeline.group) - before_s + self._waiting_s(parts, pipeline.capacity_blocks)

    def _parts(self, group: Group) -> list[GroupDemand]:
        """The layout's groups over the members of `group`."""
        found = [self.by_member[member] for member in group.members if member in self.by_member]
        return list({part.group.members: part for part in found}.values())

    def _moving_s(self, group: Group) -> float:
        """All p members send at once: each has 1/p of the KV, and sends what others go on with. That is (n - 1)/n of
        it where n parts become one or one becomes n, each member alone if nothing says otherwise.
        """
        parts = self._parts(group)
        kv_bytes = sum(part.resident_blocks * part.bytes_per_block for part in parts)
        num_parts = len(parts) if len(parts) > 1 else group.degree
        share = (num_parts - 1) / num_parts / group.degree
        return sum(part.num_running for part in parts) * kv_bytes * share / self.config.link_bytes_per_s

    def _waiting_s(self, parts: Iterable[GroupDemand], capacity_blocks: int) -> float:
        """Requests of `parts` that find no memory in `capacity_blocks`, as long as the others are, wait for a dwell."""
        parts = list(parts)
        num_requests = sum(part.num_running + part.num_waiting for part in parts)
        return self._stall_s(num_requests, sum(part.demand_blocks for part in parts), capacity_blocks)

    def _waiting_alone_s(self, part: GroupDemand) -> float:
        """Those of one group that find no memory in what it holds."""
        return self._stall_s(part.num_running + part.num_waiting, part.demand_blocks, part.capacity_blocks)

    def _stall_s(self, num_requests: int, demand_blocks: int, capacity_blocks: int) -> float:
        num_requests = max(1, num_requests)
        excess_blocks = max(0.0, demand_blocks - self.config.drop_above * capacity_blocks)
        return num_requests * excess_blocks / max(1, demand_blocks) * self.config.min_dwell_s


def _keep_s(demand: MemoryDemand, config: DropConfig) -> float:
    """The sum of `_waiting_alone_s` over what is overloaded, which may be a thousand groups."""
    columns, at = demand.by_member.columns, demand.overloaded_at
    num_requests = (columns.num_running + columns.num_waiting)[at].clip(1)
    demand_blocks = columns.demand_blocks[at]
    excess_blocks = (demand_blocks - config.drop_above * columns.capacity_blocks[at]).clip(0.0)
    waiting_s = num_requests * excess_blocks / demand_blocks.clip(1) * config.min_dwell_s
    total_s: float = sum(waiting_s.tolist())  # one by one, as the others add up
    return total_s


def demands_over(snapshot: ClusterSnapshot, group: Group) -> dict[InstanceId, GroupDemand]:
    """The demand of the layout's groups over the members of `group`, by member, where no prediction exists."""
    groups = [g for g in snapshot.layout.groups if not set(g.members).isdisjoint(group.members)]
    members = {member for g in groups for member in g.members}
    instances = {
        i.key.instance_id: i
        for i in snapshot.instances
        if i.key.instance_id in members and i.state is InstanceState.READY
    }
    return {
        member: group_demand(g, instances)
        for g in groups
        if all(member in instances for member in g.members)
        for member in g.members
    }
