"""What groups run and queue now, and what those would that a change leads to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from operator import attrgetter

import numpy as np

from pengserve.planners.columns import ReadyInstances, lane_capacity
from pengserve.planners.judge.watch import Traffic
from pengserve.planners.types.layout import Group
from pengserve.planners.types.snapshot import ClusterSnapshot


@dataclass(frozen=True, slots=True)
class GroupState:
    """What a group runs and queues, or would; counts are spread where it does not exist yet."""

    running: float = 0.0
    held_tokens: float = 0.0
    waiting: float = 0.0
    waiting_tokens: float = 0.0
    again: float = 0.0  # of those that wait: they had begun to answer,
    again_tokens: float = 0.0  # ... and what they had

    @property
    def figures(self) -> tuple[float, ...]:
        """In the order above."""
        found: tuple[float, ...] = _FIGURES(self)
        return found

    def __add__(self, other: "GroupState") -> "GroupState":
        return GroupState.total((self, other))

    @classmethod
    def total(cls, states: "Sequence[GroupState]") -> "GroupState":
        """Of all of `states` together."""
        return cls(*map(sum, zip(*map(_FIGURES, states), strict=True)))

    def share(self, part: float) -> "GroupState":
        """So much of everything."""
        return GroupState(*(part * figure for figure in self.figures))

    def parted(self, num_tokens: float) -> "tuple[GroupState, GroupState]":
        """Without running requests that hold so many tokens of KV; and these."""
        part = min(1.0, num_tokens / max(1.0, self.held_tokens))
        moved = GroupState(self.running * part, self.held_tokens * part)
        rest = replace(self, running=self.running - moved.running, held_tokens=self.held_tokens - moved.held_tokens)
        return rest, moved


_FIGURES = attrgetter(*GroupState.__slots__)


class GroupStates:
    """Of one look."""

    def __init__(self, snapshot: ClusterSnapshot, instances: ReadyInstances, traffic: Traffic) -> None:
        self._instances, self._traffic = instances, traffic
        self._num_members = max(1, len(instances))
        self._outside = sum(d.num_waiting for d in snapshot.demands if not d.longest_waiting_tokens)
        sizes = traffic.prompt_tokens + np.array(traffic.ages)
        self._unequal = float(sizes.std() / sizes.mean())  # requests that run

    def knows(self, group: Group) -> bool:
        """Whether its leader is up, whose figures are the group's."""
        return group.leader in self._instances

    def now(self, group: Group) -> GroupState:
        """Of a group that stands, and is known. What waits at ingresses is spread over all instances."""
        leader, traffic = self._instances[group.leader], self._traffic
        stats, lane = leader.stats, lane_capacity(leader, group.shape)
        block_size = stats.block_size or (lane.block_size if lane is not None else 1)
        outside = self._outside * group.degree / self._num_members
        paused = sum(self._instances[m].stats.num_paused for m in group.members if m in self._instances)
        others = outside + paused + traffic.away.of(group.members)
        # What is left of prompts under way waits: as many requests as it would be prompts.
        begun = min(float(stats.num_running), stats.prefilling_tokens / traffic.prompt_tokens)
        return GroupState(
            running=stats.num_running + stats.num_holding - begun,
            held_tokens=float(stats.kv_blocks_used * block_size),
            waiting=stats.num_waiting - stats.num_holding + begun + others,
            waiting_tokens=stats.queued_tokens + stats.prefilling_tokens + others * traffic.prompt_tokens,
            again=float(stats.num_preempted),
            again_tokens=float(stats.preempted_tokens),
        )

    def spread(self, whole: GroupState, groups: Sequence[Group], num_members: int) -> Iterator[GroupState]:
        """What each of `groups` will run: as many requests a member, which are not equally long.

        The first one stands for the one that gets the longest ones.
        """
        each = whole.running / max(1, len(groups))
        more = min(1.0, self._unequal / sqrt(max(1.0, each))) if len(groups) > 1 else 0.0
        for at, group in enumerate(groups):
            state = whole.share(group.degree / num_members)
            share = more if at == 0 else -more / (len(groups) - 1)
            yield replace(state, held_tokens=state.held_tokens * (1.0 + share))
