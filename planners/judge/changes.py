"""Changes of the layout that could be made now, without asking whether they pay: what the judge chooses among."""

from collections.abc import Callable, Collection, Iterator, Mapping
from heapq import nsmallest
from itertools import islice
from math import inf
from typing import NamedTuple

import numpy as np

from pengserve.planners.drop import Verdict, pipeline_buckets
from pengserve.planners.load import OVERLOAD, ClusterView, formable_groups
from pengserve.planners.overload import MemoryDemand
from pengserve.planners.projection import projected_loads
from pengserve.planners.restore import can_restore, ways
from pengserve.planners.steps import next_step
from pengserve.planners.types.config import DropConfig, MergeConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind, alone
from pengserve.planners.types.snapshot import InstanceSnapshot
from pengserve.planners.types.strategy import SwitchStrategy

MOST = 5  # of each kind and degree, after a cheap filter: a thousand instances could do hundreds of things
# ... of those that only make use of spare compute, among more than so many instances: the idlest of many are alike.
MANY, MOST_OF_MANY = 128, 3
BUSY = 4.0  # requests by member of a pipeline: with as many, it may give way to tensor-parallel groups


What = tuple[str, Group, tuple[Group, ...], tuple[Group, ...]]


class Change(NamedTuple):
    """One thing that could be done, and what it is for."""

    verb: str  # of the switch that comes next
    group: Group  # that this switch begins or ends
    parts: tuple[Group, ...]  # that the switch ends in, where these are not its members alone
    before: tuple[Group, ...]  # groups of the layout that it is about
    after: tuple[Group, ...]  # what they will be, perhaps some switches later
    why: str = ""
    is_spare: bool = False  # only where compute is plentiful: it costs throughput, and no memory is short
    can_wait: bool = False  # for memory that is nearly full: so far its members together hold what is needed

    @property
    def what(self) -> What:
        """What it is, without what it is for: the same from look to look."""
        return self.verb, self.group, self.parts, self.after

    @property
    def makes_room(self) -> bool:
        """Whether it is for memory that is short."""
        return self.verb == "drop" and not self.is_spare

    @property
    def is_merge(self) -> bool:
        """Whether the next switch forms a group."""
        return self.verb in ("merge", "drop")


def tp_changes(
    view: ClusterView,
    config: MergeConfig,
    claimed: Collection[InstanceId],
    may_split: Callable[[Group], bool],
    standing: Collection[Group],
) -> Iterator[Change]:
    """Tensor-parallel groups that could end, the fullest first; and those that could be formed, the idlest first."""

    def is_free(group: Group) -> bool:
        return all(m not in claimed for part in view.groups_over(group.members) for m in part.members)

    requests = view.instances.stat("num_running") + view.instances.stat("num_waiting")
    full = nsmallest(2 * MOST, standing, key=lambda g: (-int(requests[g.members[0]]) / len(g.members), g.members))
    ends = [g for g in full if is_free(g) and may_split(g)][:MOST]
    for group in ends:
        yield Change("split", group, (), (group,), alone(group.members), f"{group} computes as its members alone")
    most_spare = _most_spare(view)
    is_hard = config.load_strategy == SwitchStrategy.HARD  # it would pause what runs for as long as the group stands
    by_degree: dict[int, list[tuple[float, Group]]] = {}
    profiled = _profiled(view.instances)
    most = (inf if profiled else OVERLOAD) if config.merge_below > 0 else 0.0  # 0: people want no merge for load
    for group, load, is_known in projected_loads(view, config.max_degree, most, 2 * most_spare):
        if is_known and group not in standing and (load < OVERLOAD or group.shape in profiled):
            by_degree.setdefault(group.degree, []).append((load, group))
    for found in by_degree.values():
        count = 0
        for load, goal in nsmallest(2 * most_spare, found, key=lambda pair: (pair[0], pair[1].members)):
            step = next_step(view, goal, may_split) if is_free(goal) else None
            if step is None or (is_hard and load > 0):
                continue
            group, is_merge = step
            why, before = f"{goal} computes each layer together", view.groups_over(goal.members)
            yield Change("merge" if is_merge else "split", group, (), before, with_rest(goal, before), why, True)
            count += 1
            if count == most_spare:
                break


def _most_spare(view: ClusterView) -> int:
    return MOST if len(view.instances) <= MANY else MOST_OF_MANY


def _profiled(instances: Mapping[InstanceId, InstanceSnapshot]) -> frozenset[str]:
    """Tensor-parallel shapes whose steps were profiled, at the first instance: those of a cluster are alike.

    Where its steps are a guess, a group is formed at low load alone.
    """
    lanes = next((instance.lanes for instance in instances.values()), ())
    return frozenset(lane.shape for lane in lanes if lane.shape.startswith(GroupKind.TP) and lane.step_cost is not None)


def pp_changes(
    view: ClusterView,
    config: DropConfig,
    claimed: Collection[InstanceId],
    may_split: Callable[[Group], bool],
    planned: Collection[Group],
) -> Iterator[Change]:
    """Pipelines that could be formed, the fullest members first: stages read the chunks of one prompt side by side, and
    share one memory. Those of `planned`, for memory, are left out.
    """
    requests = view.instances.stat("num_running") + view.instances.stat("num_waiting")
    is_free = np.zeros(max(view.instances.size, view.table.size), dtype=np.bool_)
    is_free[view.instances.ids] = True
    is_free[list(claimed)] = False
    groups, buckets = pipeline_buckets(view.snapshot.groups)
    most_spare = _most_spare(view)
    for bucket in buckets:
        if bucket.members.shape[1] > config.max_stages:
            continue
        able = np.flatnonzero(is_free[bucket.members].all(axis=1))
        fullest = able[np.argsort(-requests[bucket.members[able]].sum(axis=1), kind="stable")[: 2 * most_spare]]
        count = 0
        for goal in (groups[bucket.start + at] for at in fullest.tolist()):
            step = next_step(view, goal, may_split) if goal not in planned else None
            if step is not None and all(map(view.is_known, view.groups_over(goal.members))):
                group, is_merge = step
                why = f"the stages of {goal} read prompts side by side, and share their memory"
                before = view.groups_over(goal.members)
                yield Change("drop" if is_merge else "split", group, (), before, with_rest(goal, before), why, True)
                count += 1
            if count == most_spare:
                break


def with_rest(goal: Group, before: Collection[Group]) -> tuple[Group, ...]:
    """What becomes of the groups that end for `goal`: their members that it has no need of are alone."""
    rest = [member for group in before for member in group.members if member not in goal.members]
    return (goal, *alone(rest))


def drop_changes(demand: MemoryDemand, verdict: Verdict) -> Iterator[Change]:
    """Pipelines that would make room, the one whose members are shortest of memory first."""
    for pipeline in verdict.plan.pipelines[:MOST] if verdict.plan is not None else ():
        group = pipeline.group
        before = tuple(dict.fromkeys(demand.by_member[m].group for m in group.members))
        can_wait = pipeline.demand_blocks <= pipeline.held_blocks
        yield Change("drop", group, (), before, with_rest(group, before), pipeline.why, can_wait=can_wait)


def restore_changes(
    demand: MemoryDemand,
    config: DropConfig,
    merge: MergeConfig,
    groups: tuple[Group, ...],
    claimed: Collection[InstanceId],
    longest_waiting_tokens: int,
) -> Iterator[Change]:
    """Pipelines whose requests surely fit into what they could end in, the emptiest first; those that are busy could
    also end in tensor-parallel groups of their members.
    """
    if config.restore_below <= 0:  # people want none
        return
    table, demand_blocks = demand.by_member.table, demand.by_member.columns.demand_blocks
    pipelines = table.of_kind[GroupKind.PP]
    blocks = demand_blocks[[table.position_of[group.leader] for group in pipelines]]
    emptiest = (pipelines[at] for at in np.argsort(blocks, kind="stable").tolist())
    for group in islice((g for g in emptiest if not any(m in claimed for m in g.members)), MOST):
        if not demand.by_member[group.leader].is_known:
            continue
        for way in ways(group, groups):
            if can_restore(demand, way, config.drop_above, longest_waiting_tokens):
                parts = () if way.is_alone else way.parts
                yield Change("restore", group, parts, (group,), way.parts, "memory: what runs fits without the drop")
                if way.is_alone:
                    yield from _tp_instead(demand, group, merge, groups)


def _tp_instead(demand: MemoryDemand, group: Group, config: MergeConfig, groups: tuple[Group, ...]) -> Iterator[Change]:
    """The tensor-parallel groups that the members of a pipeline could be instead of alone: where many answers run,
    their tokens come sooner. Where few do, the tail of TTFT is single prompts, and which shape reads these sooner is
    not known well enough.
    """
    stats = demand.instances[group.leader].stats
    is_wanted = config.is_auto and config.merge_below > 0 and config.load_strategy != SwitchStrategy.HARD
    if not is_wanted or stats.num_running + stats.num_waiting < BUSY * group.degree:
        return
    formable, profiled = formable_groups(groups), _profiled(demand.instances)
    for degree in formable.tp_degrees:
        if degree > min(group.degree, config.max_degree):
            break
        members = [group.members[at : at + degree] for at in range(0, group.degree, degree)]
        parts = tuple(Group(kind=GroupKind.TP, members=some) for some in members)
        if parts[0].shape in profiled and all(part in formable for part in parts):
            why = f"{' '.join(map(str, parts))} compute each layer together"
            yield Change("restore", group, (), (group,), parts, why, True)
