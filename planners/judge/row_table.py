"""The rows of the fluid model for one look: a row for each group as it is, and each that could be."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import exp, log, sqrt
from typing import NamedTuple

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


class _Row(NamedTuple):
    """What differs from group to group."""

    shape: str
    num_servers: int
    kv_tokens: int
    slots: int
    stall_s: float
    share: float  # of all requests that come
    num_routes: int
    state: GroupState


class RowTable:
    """Rows are added first and predicted together: to predict all of them takes hardly longer than one."""

    def __init__(
        self,
        instances: ReadyInstances,
        traffic: Traffic,
        costs: Costs,
        config: JudgeConfig,
    ) -> None:
        self._instances, self._traffic, self._costs, self._config = instances, traffic, costs, config
        self.horizon_s = config.horizon(_life_s(traffic, costs))
        self._num_members = max(1, len(instances))
        lanes = next((instance.lanes for instance in instances.values() if instance.lanes), ())
        self._step_tokens = float(lanes[0].step_tokens if lanes else STEP_TOKENS)
        self._rows: list[_Row] = []
        self._place_of: dict[_Row, int] = {}
        self._made: Rows | None = None
        self._shares: Floats = np.zeros(0)
        self._terms_of: dict[str, tuple[float, ...]] = {}
        self._spread = sqrt(log(max(1.0, traffic.pairs / max(1.0, traffic.prompt_tokens))))

    def add(self, group: Group, state: GroupState, stall_s: float, num_routes: int) -> int | None:
        """The place of a row, which groups that are alike have together; None where the shape cannot run there, or
        nothing is known of its steps.
        """
        cost, lane = self._costs.of(group.shape), self._lane(group)
        if cost is None or lane is None:
            return None
        shape = group.shape
        if shape not in self._terms_of:
            self._terms_of[shape] = cost.terms
        row = _Row(
            shape=shape,
            num_servers=group.degree if group.kind is GroupKind.PP else 1,
            kv_tokens=lane.num_tokens,
            slots=lane.max_num_seqs,
            state=state,
            stall_s=stall_s,
            share=group.degree / self._num_members,
            num_routes=num_routes,
        )
        place = self._place_of.setdefault(row, len(self._rows))
        if place == len(self._rows):
            self._rows.append(row)
        return place

    def _lane(self, group: Group) -> KvCapacity | None:
        """What the group can hold: as much as its smallest member can; None where one cannot run it."""
        common = self._instances.common_lane(group.shape)
        if common is not None:
            return common if self._instances.keys() >= set(group.members) else None
        lanes = [lane_capacity(self._instances.get(m), group.shape) for m in group.members]
        known = [lane for lane in lanes if lane is not None]
        return min(known, key=lambda lane: lane.num_blocks) if len(known) == len(lanes) else None

    def state(self, row: int) -> GroupState:
        """What it begins with."""
        return self._rows[row].state

    def shape(self, row: int) -> str:
        """Of its group."""
        return self._rows[row].shape

    def fates(
        self,
        scenarios: Sequence[int] = SCENARIOS,
        at: Sequence[int] | None = None,
        also: tuple[Rows, Floats] | None = None,
    ) -> list[Fate]:
        """The fate of the rows in these places, or of all, in each scenario; and last that of other rows, within their
        own horizons, where there are any.
        """
        expected, traffic, num = self._expected(), self._traffic, len(scenarios)
        if at is not None:
            expected = expected.at(at)
        share = self._shares if at is None else self._shares[list(at)]
        count = len(share)
        coming = [traffic.coming[scenario] for scenario in scenarios]
        rows = replace(
            Rows.joined([expected] * num),
            rate=np.concatenate([one.now * share for one in coming]),
            later_rate=np.concatenate([one.later * share for one in coming]),
            burst_s=np.repeat([one.lasts_s for one in coming], count),
        )
        ends = [count * (place + 1) for place in range(num)]
        if also is None:
            fate = predict(rows, self.horizon_s)
        else:
            more, horizons_s = also
            fate = predict(Rows.joined([rows, more]), np.append(np.full(ends[-1], self.horizon_s), horizons_s))
            ends.append(len(fate.cost_s))
        return [fate.part(begin, end) for begin, end in pairwise([0, *ends])]

    def expected(self, at: Sequence[int]) -> Rows:
        """Some rows, at the expected rate of requests."""
        return self._expected().at(at)

    def _expected(self) -> Rows:
        """All rows that were added so far."""
        if self._made is None or len(self._made.servers) < len(self._rows):
            self._made = self._make()
        return self._made

    def _make(self) -> Rows:
        traffic, ones = self._traffic, np.ones(len(self._rows))
        coming = traffic.coming.expected
        ttft_s, tpot_s, miss_s = self._limits()
        columns: Floats = np.array([(*row.state.figures, *row[1:-1]) for row in self._rows], dtype=np.float64).T
        *state, servers, kv_tokens, slots, stall_s, share, routes = columns
        running, held_tokens, waiting, waiting_tokens, again, again_tokens = state
        self._shares = share
        return Rows(
            servers=servers,
            cost=np.array([self._terms_of[row.shape] for row in self._rows]),
            kv_tokens=kv_tokens,
            slots=slots,
            step_tokens=self._step_tokens * ones,
            mates=traffic.mates * share,
            running=running,
            held_tokens=held_tokens,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            again=again,
            again_tokens=again_tokens,
            stall_s=stall_s,
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
            routes=routes,
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
