"""Which tensor-parallel groups urgent requests get: those that have tokens much sooner, and cost all others little.

A group for urgent requests is not judged by what it gains, since it is for few. But where it computes no faster than an
instance alone it is of use to none, and where it cannot serve what its members run, the urgent ones wait there too.
"""

from collections.abc import Collection, Sequence
from functools import cached_property
from math import inf

from pengserve.planners.columns import ReadyInstances
from pengserve.planners.judge.changes import Change, with_rest
from pengserve.planners.judge.judge import JudgeHistory, pricing_of
from pengserve.planners.judge.pricing import SOONER, Pricing
from pengserve.planners.judge.watch import costs_of, traffic_of
from pengserve.planners.load import ClusterView, formable_groups
from pengserve.planners.types.config import DropConfig, JudgeConfig
from pengserve.planners.types.layout import Group, GroupKind, alone
from pengserve.planners.types.snapshot import ClusterSnapshot


class Urgency:
    """One look's answers, found as they are asked for. Where nothing can be predicted, every group will do."""

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        instances: ReadyInstances,
        config: JudgeConfig,
        drop: DropConfig,
        history: JudgeHistory,
    ) -> None:
        self._snapshot, self._instances, self._config, self._drop = snapshot, instances, config, drop
        self._history = history

    def is_slow(self, degree: int) -> bool:
        """Whether a group of so many has tokens hardly sooner than an instance alone, as far as is known."""
        return degree in self._slow_degrees

    def harmful(self, view: ClusterView, groups: Sequence[Group]) -> frozenset[Group]:
        """Those with which all requests of their members together are served worse, beyond the margin. Each stands, or
        could be formed.
        """
        if not (groups and self._is_known):
            return frozenset()
        changes = [_split(g) if view.group_of.get(g.leader) == g else _merge(view, g) for g in groups]
        found = set[Group]()
        for change, kept_s, then_s in self._pricing.costs_s(changes):
            without_s, with_s = (then_s, kept_s) if change.verb == "split" else (kept_s, then_s)
            if with_s - without_s > self._config.least(without_s):
                found.add(change.group)
        return frozenset(found)

    @cached_property
    def _is_known(self) -> bool:
        return self._history.knows(self._instances)

    @cached_property
    def _pricing(self) -> Pricing:
        return pricing_of(self._snapshot, self._instances, self._config, self._drop, self._history)

    @cached_property
    def _slow_degrees(self) -> Collection[int]:
        if not self._is_known:
            return frozenset()
        watched, instances = self._history.watched, self._instances
        costs, traffic = costs_of(watched, instances), traffic_of(watched)
        batch = max(1.0, float(instances.stat("num_running").sum()) / max(1, len(instances)))
        held = batch * (traffic.prompt_tokens + 0.5 * traffic.output_tokens)

        def token_s(shape: str) -> float:
            cost = costs.of(shape)
            return inf if cost is None else cost.step_s(batch, batch, held)

        most_s = SOONER * token_s(GroupKind.DP)
        degrees = formable_groups(self._snapshot.groups).tp_degrees
        return frozenset(degree for degree in degrees if most_s < token_s(f"{GroupKind.TP}{degree}") < inf)


def _split(group: Group) -> Change:
    return Change("split", group, (), (group,), alone(group.members))


def _merge(view: ClusterView, group: Group) -> Change:
    before = view.groups_over(group.members)
    return Change("merge", group, (), before, with_rest(group, before))
