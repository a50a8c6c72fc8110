"""What the merge planner remembers from look to look."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from pengserve.planners.columns import group_table, ready_instances
from pengserve.planners.load import ClusterView
from pengserve.planners.projection import projected_loads
from pengserve.planners.types.config import MergeConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import ClusterSnapshot


class Reason(StrEnum):
    """Why a group stands."""

    LONG_CONTEXT = "long context"
    PRIORITY = "priority"
    LOAD = "load"


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingGroup:
    """Since when a tp group is in the layout, and why."""

    since_s: float
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadHistory:
    """What the planner remembers from look to look. A value: a call returns the next one. Times are snapshot times."""

    running_groups: Mapping[Group, StandingGroup] = field(default_factory=dict)  # tp groups of the layout
    low_since_s: Mapping[Group, float] = field(default_factory=dict)  # groups that load would allow, and since when
    queue_since_s: Mapping[InstanceId, float] = field(default_factory=dict)  # leaders whose requests wait
    wanted_s: Mapping[int, float] = field(default_factory=dict)  # degrees, and when a request last asked for them
    priority_s: float | None = None  # when a priority request was last in flight
    relieved_s: float | None = None  # when a group was last split because of its load
    planned: tuple[Group, Reason] | None = None  # the newest merge that was planned
    seen_s: float | None = None  # the newest look


def waiting_since(snapshot: ClusterSnapshot, history: LoadHistory) -> dict[InstanceId, float]:
    before = history.queue_since_s
    waiting = np.flatnonzero(ready_instances(snapshot.instances).stat("num_waiting")).tolist()
    return {InstanceId(i): before.get(i, snapshot.time_s) for i in waiting}


def observe(view: ClusterView, config: MergeConfig, history: LoadHistory, is_judged: bool) -> LoadHistory:
    snapshot = view.snapshot
    now_s, demands = snapshot.time_s, snapshot.demands
    wanted = {degree: now_s for d in demands for degree, num in d.wanted_degrees if num > 0}
    priority_s = now_s if any(d.num_priority > 0 for d in demands) else history.priority_s
    return replace(
        history,
        running_groups={
            g: _running_group(g, snapshot, history) for g in group_table(snapshot.layout.groups).of_kind[GroupKind.TP]
        },
        low_since_s={} if is_judged else dict(_low(view, config, history.low_since_s)),
        wanted_s={d: s for d, s in {**history.wanted_s, **wanted}.items() if now_s - s < config.min_dwell_s},
        priority_s=None if priority_s is None or now_s - priority_s >= config.min_dwell_s else priority_s,
    )


def _running_group(group: Group, snapshot: ClusterSnapshot, history: LoadHistory) -> StandingGroup:
    known = history.running_groups.get(group)
    if known is not None:
        return known
    is_planned = history.planned is not None and history.planned[0] == group
    reason = history.planned[1] if history.planned is not None and is_planned else Reason.LOAD
    return StandingGroup(since_s=snapshot.layout_since_s or snapshot.time_s, reason=reason)


def _low(view: ClusterView, config: MergeConfig, before: Mapping[Group, float]) -> Iterable[tuple[Group, float]]:
    """Groups whose load would be below `merge_below`. Where stats are stale, what was known stands."""
    now_s = view.snapshot.time_s
    for group, _, is_known in projected_loads(view, config.max_degree, config.merge_below):
        if is_known or group in before:
            yield group, before.get(group, now_s)
