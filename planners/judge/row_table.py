"""The rows of the fluid model for one look: a row for each group as it is, and each that could be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log, sqrt

import numpy as np

from pengserve.planners.columns import Floats, ReadyInstances, lane_capacity
from pengserve.planners.judge.costs import Costs
from pengserve.planners.judge.fluid import Fate, predict
from pengserve.planners.judge.group_state import GroupState
from pengserve.planners.judge.rows import Rows
from pengserve.planners.judge.watch import Traffic
from pengserve.planners.types.config import JudgeConfig
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.planners.types.step_cost import STEP_TOKENS

FEW, EXPECTED, MANY, MOST = range(4)  # scenarios: how many requests come
SCENARIOS = FEW, EXPECTED, MANY, MOST


@dataclass(frozen=True, slots=True)
class _Row:
    """What differs from group to group."""

    shape: str
    num_servers: int
    kv_tokens: int
    slots: int
    state: GroupState
    stall_s: float
    share: float  # of all requests that come
    num_routes: int


class RowTable:
    """Rows are added first and predicted together: to predict all of them takes hardly longer than one."""

    def __init__(
        self,
        instances: ReadyInstances,
        traffic: Traffic,
        costs: Costs,
        config: JudgeConfig,
        correction: Callable[[str], float],
    ) -> None:
        """`correction`: factor on request-seconds of a shape, by which the model was wrong of late."""
        self._instances, self._traffic, self._costs, self._config = instances, traffic, costs, config
        self._correction = correction
        self.horizon_s = config.horizon(_life_s(traffic, costs))
        self._num_members = max(1, len(instances))
        lanes = next((instance.lanes for instance in instances.values() if instance.lanes), ())
        self._step_tokens = float(lanes[0].step_tokens if lanes else STEP_TOKENS)
        self._rows: list[_Row] = []
        self._made: Rows | None = None
        self._terms_of: dict[str, tuple[float, ...]] = {}
        self._spread = sqrt(log(max(1.0, traffic.pairs / max(1.0, traffic.prompt_tokens))))

    def add(self, group: Group, state: GroupState, stall_s: float, num_routes: int) -> int | None:
        """The place of a new row; None where the shape cannot run there, or nothing is known of its steps."""
        cost, lane = self._costs.of(group.shape), self._lane(group)
        if cost is None or lane is None:
            return None
        self._terms_of[group.shape] = cost.terms
        self._rows.append(
            _Row(
                shape=group.shape,
                num_servers=group.degree if group.kind is GroupKind.PP else 1,
                kv_tokens=lane.num_tokens,
                slots=lane.max_num_seqs,
                state=state,
                stall_s=stall_s,
                share=group.degree / self._num_members,
                num_routes=num_routes,
            )
        )
        return len(self._rows) - 1

    def _lane(self, group: Group) -> KvCapacity | None:
        """What the group can hold: as much as its smallest member can; None where one cannot run it."""
        common = self._instances.common_lane(group.shape)
        if common is not None:
            return common if all(m in self._instances for m in group.members) else None
        lanes = [lane_capacity(self._instances.get(m), group.shape) for m in group.members]
        known = [lane for lane in lanes if lane is not None]
        return min(known, key=lambda lane: lane.num_blocks) if len(known) == len(lanes) else None

    def state(self, row: int) -> GroupState:
        """What it begins with."""
        return self._rows[row].state

    def fates(self, scenarios: Sequence[int] = SCENARIOS) -> list[Fate]:
        """The fate of every row in each scenario."""
        traffic, num, count = self._traffic, len(scenarios), len(self._rows)
        share = np.array([row.share for row in self._rows])
        coming = [traffic.coming[scenario] for scenario in scenarios]
        rows = replace(
            Rows.joined([self._expected()] * num),
            rate=np.concatenate([at.now * share for at in coming]),
            later_rate=np.concatenate([at.later * share for at in coming]),
            burst_s=np.repeat([at.lasts_s for at in coming], count),
        )
        fate = predict(rows, self.horizon_s)
        factors = [self._correction(row.shape) for row in self._rows]
        fate = replace(fate, cost_s=fate.cost_s * np.tile(factors, num))
        return [
            Fate(**{f.name: getattr(fate, f.name)[at * count : (at + 1) * count] for f in fields(Fate)})
            for at in range(num)
        ]

    def expected(self, at: Sequence[int]) -> Rows:
        """Some rows, at the expected rate of requests."""
        rows = self._expected()
        return Rows(**{f.name: getattr(rows, f.name)[list(at)] for f in fields(rows)})

    def _expected(self) -> Rows:
        """All rows that were added so far."""
        if self._made is None or len(self._made.servers) < len(self._rows):
            self._made = self._make()
        return self._made

    def _make(self) -> Rows:
        traffic, ones = self._traffic, np.ones(len(self._rows))
        coming = traffic.coming.expected
        ttft_s, tpot_s, miss_s = self._limits()

        def column(get: Callable[[_Row], float]) -> Floats:
            return np.array([get(row) for row in self._rows], dtype=np.float64)

        share = column(lambda row: row.share)
        return Rows(
            servers=column(lambda row: row.num_servers),
            cost=np.array([self._terms_of[row.shape] for row in self._rows]),
            kv_tokens=column(lambda row: row.kv_tokens),
            slots=column(lambda row: row.slots),
            step_tokens=self._step_tokens * ones,
            mates=traffic.mates * share,
            running=column(lambda row: row.state.running),
            held_tokens=column(lambda row: row.state.held_tokens),
            waiting=column(lambda row: row.state.waiting),
            waiting_tokens=column(lambda row: row.state.waiting_tokens),
            stall_s=column(lambda row: row.stall_s),
            rate=coming.now * share,
            later_rate=coming.later * share,
            burst_s=coming.lasts_s * ones,
            prompt_tokens=traffic.prompt_tokens * ones,
            read_share=traffic.read_share * ones,
            output_tokens=traffic.output_tokens * ones,
            output_spread=traffic.output_spread * ones,
            ages=np.repeat(np.array([traffic.ages]), len(ones), axis=0),
            pairs=traffic.pairs * ones,
            spread=self._spread * ones,
            ttft_limit_s=ttft_s * ones,
            tpot_limit_s=tpot_s * ones,
            miss_s=miss_s * ones,
            routes=column(lambda row: row.num_routes),
        )

    def _limits(self) -> tuple[float, float, float]:
        """Of TTFT and TPOT, as multiples of what an instance alone gives a request that is alone: what users know from
        plain vLLM. And what one beyond them costs, in request-seconds.
        """
        traffic, config = self._traffic, self._config
        prompt, cost = traffic.prompt_tokens * exp(-0.5 * self._spread**2), self._costs.of(GroupKind.DP)
        assert cost is not None, "the judge predicts nothing before it is known"
        first_s = cost.step_s(prompt, 1, prompt, prompt * prompt)
        token_s = cost.step_s(1, 1, traffic.prompt_tokens)
        miss_s = config.miss_weight * (first_s + traffic.output_tokens * token_s)
        return config.slo_scale * first_s, config.slo_scale * token_s, miss_s


def _life_s(traffic: Traffic, costs: Costs) -> float:
    """Seconds that an answer takes by itself. Where instances are crowded it takes longer: no reason to look
    further, since nothing is known beyond the burst that crowds them.
    """
    cost = costs.of(GroupKind.DP)
    if cost is None:
        return 0.0
    return traffic.output_tokens * cost.step_s(1.0, 1.0, traffic.prompt_tokens + 0.5 * traffic.output_tokens)
