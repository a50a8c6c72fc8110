"""The price of each change: what becomes of its groups with it and without it, at few, expected and many requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pengserve.planners.columns import ReadyInstances, lane_capacity
from pengserve.planners.judge.changes import Change
from pengserve.planners.judge.costs import Costs
from pengserve.planners.judge.fluid import WAIT_WEIGHT, Fate
from pengserve.planners.judge.forecasts import Forecasts, Outcome
from pengserve.planners.judge.group_state import GroupState, GroupStates
from pengserve.planners.judge.prediction import Prediction, Priced, PricedMove
from pengserve.planners.judge.row_table import EXPECTED, FEW, MOST, SCENARIOS, RowTable
from pengserve.planners.judge.rows import Rows, RowSets
from pengserve.planners.judge.switch_costs import SwitchPrices
from pengserve.planners.judge.watch import Traffic
from pengserve.planners.types.config import JudgeConfig
from pengserve.planners.types.layout import Group, GroupKind, alone
from pengserve.planners.types.snapshot import ClusterSnapshot

MOST_READ = 1.0  # share of a pipeline's time that prompts may take: beyond it compute is short, and not memory
# Share of a group's time that prompts may take where it is formed for latency, even if many requests come; and where
# its tokens come little sooner.
MOST_SPARE, LITTLE_SPARE = 0.5, 0.4
SOONER = 0.8  # of the time by token without a group: at most so much counts as much sooner
MOVE_S = 0.05  # that a request stalls which goes to another instance while both serve: for the last of its KV


@dataclass(frozen=True, slots=True)
class _Plan:
    """A change as rows of the model."""

    change: Change
    before: tuple[int, ...]
    after: tuple[int, ...]
    there_s: float  # that requests stall on the way there,
    back_s: float  # ... and on the way back


@dataclass(frozen=True, slots=True)
class _Move:
    """Requests that could change their group, as rows of the model."""

    source: Group
    target: Group
    num_requests: float
    rows: tuple[int, ...]  # of both groups as they are, and with the move


class _Figures(NamedTuple):
    """What becomes of a plan's groups. Lists are by scenario."""

    kept_s: list[float]  # request-seconds without the change
    saved_s: list[float]  # ... that it saves
    left: list[float]  # requests that run at the end, with it
    read_share: list[float]  # the most of a group's time that prompts take, with it
    full_s: float  # the least time for which memory is short in a group, without it; at the expected load
    keep: Prediction
    then: Prediction


def _figures(plans: Sequence[_Plan], fates: Sequence[Fate]) -> Iterator[_Figures]:
    """Of each of `plans`, from the fates of all rows by scenario."""
    before, after = RowSets([plan.before for plan in plans]), RowSets([plan.after for plan in plans])
    costs_s, running, read_share = (
        np.stack([getattr(fate, name) for fate in fates]) for name in ("cost_s", "running", "read_share")
    )
    kept_s, expected = before.sum(costs_s), fates[EXPECTED]
    by_scenario = kept_s, kept_s - after.sum(costs_s), after.sum(running), after.most(read_share)
    return map(
        _Figures,
        *(figure.T.tolist() for figure in by_scenario),
        before.least(expected.full_s).tolist(),
        Prediction.of(expected, before),
        Prediction.of(expected, after),
    )


class Pricing:
    """One look's working state."""

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        instances: ReadyInstances,
        traffic: Traffic,
        costs: Costs,
        switches: SwitchPrices,
        config: JudgeConfig,
        link_bytes_per_s: float,
        forecasts: Forecasts | None = None,
    ) -> None:
        """`forecasts`: what earlier ones have taught, by how much the model is wrong. None: nothing."""
        self._traffic, self._switches, self._config, self._link = traffic, switches, config, link_bytes_per_s
        self._states = GroupStates(snapshot, instances, traffic)
        self._table = RowTable(instances, traffic, costs, config)
        self.forecasts, self.outcomes = forecasts or Forecasts(), tuple[Outcome, ...]()
        self._row_of: dict[Group, int] = {}  # of groups as they are
        self._rows_after: dict[Change, tuple[int, ...]] = {}
        self._fates: list[Fate] = []  # of the rows that changes were priced by, by scenario
        self._num_members = max(1, len(instances))
        self._num_routes = max(1, len(snapshot.layout.groups))
        lane = lane_capacity(next(iter(instances.values()), None), GroupKind.DP)
        self._bytes_per_token = 0.0 if lane is None else lane.bytes_per_block / max(1, lane.block_size)

    @property
    def horizon_s(self) -> float:
        """What is predicted."""
        return self._table.horizon_s

    def price(self, changes: Sequence[Change], beside: Sequence[Group] = ()) -> tuple[Priced, ...]:
        """Those of `changes` that can be predicted, in their order.

        What `keep` will be asked of the groups `beside` is predicted together with them, and what the model gives for
        forecasts whose time is over: that takes hardly longer. Then `forecasts` have learned of these `outcomes`.
        """
        plans = self._plans_of(changes)
        if not plans:
            return ()
        for group in beside:
            self._row_now(group)
        again = self.forecasts.again(self._traffic)
        fates = self._table.fates(also=again)
        if again is not None:
            self.forecasts, self.outcomes = self.forecasts.told(fates.pop().request_s)
        self._fates = self._corrected(fates, range(len(fates[EXPECTED].cost_s)))
        self._rows_after = {plan.change: plan.after for plan in plans}
        return tuple(map(self._priced, plans, _figures(plans, self._fates)))

    def costs_s(self, changes: Sequence[Change]) -> list[tuple[Change, float, float]]:
        """Request-seconds without and with each of those of `changes` that can be predicted, at the expected rate of
        requests: what `price` finds, but for what switches cost, and in less time.
        """
        plans = self._plans_of(changes)
        if not plans:
            return []
        rows = list(dict.fromkeys(row for plan in plans for row in (*plan.before, *plan.after)))
        cost_of = dict(zip(rows, self._expected(rows).cost_s.tolist(), strict=True)).__getitem__
        return [(plan.change, sum(map(cost_of, plan.before)), sum(map(cost_of, plan.after))) for plan in plans]

    def moves(self, wanted: Sequence[tuple[Group, Group, float]]) -> list[PricedMove | None]:
        """Running requests with so many tokens of KV would go from one group to another: each of these moves by itself.
        None where it cannot be predicted.
        """
        found = [self._move(*one) for one in wanted]
        known = [move for move in found if move is not None]
        if not known:
            return [None] * len(found)
        fate = self._expected([row for move in known for row in move.rows])
        places = range(0, 4 * len(known), 4)
        keeps = iter(Prediction.of(fate, RowSets([(at, at + 1) for at in places])))
        thens = iter(Prediction.of(fate, RowSets([(at + 2, at + 3) for at in places])))
        return [None if move is None else self._priced_move(move, next(keeps), next(thens)) for move in found]

    def saved_alone_s(self, changes: Sequence[Change]) -> list[float]:
        """Request-seconds that each change saves one usual request, if that comes now and is alone; 0 if not known."""
        one = GroupState(waiting=1.0, waiting_tokens=self._traffic.prompt_tokens)
        found = [
            [self._table.add(groups[0], one, 0.0, self._num_routes) for groups in (change.before, change.after)]
            for change in changes
        ]
        rows = [row for pair in found if None not in pair for row in pair if row is not None]
        costs_s = iter(self._expected(rows).cost_s.tolist() if rows else ())
        return [0.0 if None in pair else next(costs_s) - next(costs_s) for pair in found]

    def rows_after(self, change: Change) -> Rows:
        """What a priced change leads to, at the expected rate of requests."""
        return self._table.expected(self._rows_after[change])

    def keep(self, groups: Sequence[Group]) -> tuple[tuple[Group, ...], Rows, Prediction] | None:
        """Those of `groups`, of the layout, that can be predicted; and what becomes of them as they are."""
        at = {group: row for group in groups if (row := self._row_now(group)) is not None}
        if not at:
            return None
        rows = list(at.values())
        if self._fates and max(rows) < len(self._fates[EXPECTED].cost_s):
            fate, places = self._fates[EXPECTED], rows
        else:
            fate, places = self._expected(rows), list(range(len(rows)))
        return tuple(at), self._table.expected(rows), Prediction.of(fate, RowSets([places]))[0]

    def _expected(self, rows: Sequence[int]) -> Fate:
        """The fate of these rows alone, at the expected rate of requests."""
        return self._corrected(self._table.fates((EXPECTED,), rows), rows)[0]

    def _corrected(self, fates: Sequence[Fate], rows: Sequence[int]) -> list[Fate]:
        """With costs times what the model was wrong by of late, by shape."""
        factors = np.array([self.forecasts.correction(self._table.shape(row)) for row in rows])
        return [replace(fate, cost_s=fate.cost_s * factors) for fate in fates]

    # Rows -------------------------------------------------------------------------------------------------------------

    def _plans_of(self, changes: Sequence[Change]) -> list[_Plan]:
        """Of those that can be predicted, in their order."""
        return [plan for change in changes if (plan := self._plan_of(change)) is not None]

    def _plan_of(self, change: Change) -> _Plan | None:
        before = [row for group in change.before if (row := self._row_now(group)) is not None]
        if len(before) < len(change.before) or not before:
            return None
        states = [self._table.state(row) for row in before]
        whole, num_members = GroupState.total(states), sum(group.degree for group in change.before)
        there_s, back_s = self._stalls(change, whole)
        num_routes = self._num_routes + len(change.after) - len(change.before)
        after = []
        for group, state in zip(change.after, self._states.spread(whole, change.after, num_members), strict=True):
            row = self._table.add(group, state, there_s, num_routes)
            if row is None:
                return None
            after.append(row)
        return _Plan(change, tuple(before), tuple(after), there_s, back_s)

    def _row_now(self, group: Group) -> int | None:
        if group not in self._row_of:
            if not self._states.knows(group):
                return None
            row = self._table.add(group, self._states.now(group), 0.0, self._num_routes)
            if row is None:
                return None
            self._row_of[group] = row
        return self._row_of[group]

    def _move(self, source: Group, target: Group, num_tokens: float) -> _Move | None:
        kept, free = self._states.now(source), self._states.now(target)
        rest, moved = kept.parted(num_tokens)
        states = ((source, kept), (target, free), (source, rest), (target, free + moved))
        found = (self._table.add(group, state, 0.0, self._num_routes) for group, state in states)
        rows = [row for row in found if row is not None]
        return _Move(source, target, moved.running, tuple(rows)) if len(rows) == len(states) else None

    def _stalls(self, change: Change, whole: GroupState) -> tuple[float, float]:
        """Seconds that requests stall on the way there, and on the way back."""
        kv_bytes = whole.held_tokens * self._bytes_per_token
        last = change.after[0].kind is GroupKind.DP
        wide = max(*change.before, *change.after, key=lambda g: g.degree)
        num_parts = max(len(change.before), len(change.after))
        verbs = _verbs(change)
        there_s = sum(self._switches.stall_s(verb, kv_bytes, num_parts, wide.degree, self._link) for verb in verbs)
        back = (
            ("restore" if wide.kind is GroupKind.PP else "split")
            if not last
            else ("drop" if wide.kind is GroupKind.PP else "merge")
        )
        return there_s, self._switches.stall_s(back, kv_bytes, num_parts, wide.degree, self._link)

    # Prices -----------------------------------------------------------------------------------------------------------

    def _priced_move(self, move: _Move, keep: Prediction, then: Prediction) -> PricedMove:
        price_s = MOVE_S * move.num_requests
        return PricedMove(
            source=move.source,
            target=move.target,
            num_requests=move.num_requests,
            keep=keep,
            then=then,
            rows=self._table.expected(move.rows[2:]),
            price_s=price_s,
            gain_s=keep.cost_s - then.cost_s - price_s,
        )

    def _priced(self, plan: _Plan, figures: _Figures) -> Priced:
        num_members, later_rate = sum(g.degree for g in plan.change.before), self._traffic.coming.expected.later
        rate = later_rate * num_members / self._num_members
        gains, price_s, is_spare = [], 0.0, self._is_spare(plan, figures)
        # What only makes use of spare compute must bear as many requests as came at once before.
        for scenario in SCENARIOS if is_spare else SCENARIOS[:MOST]:
            # On the way back all that runs then stalls once more, and what comes meanwhile waits.
            back_s = plan.back_s * (figures.left[scenario] + WAIT_WEIGHT * rate * plan.back_s / 2.0)
            gains.append(figures.saved_s[scenario] - back_s)
            if scenario == EXPECTED:
                there_s = plan.there_s * sum(self._table.state(row).running for row in plan.before)
                price_s = there_s + back_s
        # Queues grow with the square of what is too much: what would be gained in the worst case must not decide.
        expected_s, kept_s = gains[EXPECTED], figures.kept_s[EXPECTED]
        if gains[FEW] < gains[EXPECTED]:
            expected_s = (gains[FEW] + gains[EXPECTED]) / 2.0
            # Of a tensor-parallel group, which computes less than its members, the margin is of the expected load.
            if all(group.kind is not GroupKind.TP for group in plan.change.after):
                kept_s = (figures.kept_s[FEW] + kept_s) / 2.0
        regret_s = max(0.0, -min(gains))
        if self._is_short_of_compute(plan, figures, is_spare):
            expected_s = min(expected_s, 0.0)  # it is not to be taken
        return Priced(
            change=plan.change,
            keep=figures.keep,
            then=figures.then,
            price_s=price_s,
            gain_s=expected_s - self._config.regret * regret_s,
            kept_s=kept_s,
        )

    def _is_spare(self, plan: _Plan, figures: _Figures) -> bool:
        """Whether a change only makes use of spare compute. A pipeline is for memory where memory will run out: no
        less than one that is planned when it has.
        """
        is_pp = any(group.kind is GroupKind.PP for group in plan.change.after)
        return plan.change.is_spare and not (is_pp and figures.full_s > 0.0)

    def _is_short_of_compute(self, plan: _Plan, figures: _Figures, is_spare: bool) -> bool:
        """Whether a change forms a group though prompts take most of the time, as it computes less than its members; or
        before it is known how much they take.
        """
        if not any(group.degree > 1 for group in plan.change.after):
            return False
        if plan.change.verb == "restore" and not plan.change.is_spare:
            return False
        if not is_spare:
            return figures.read_share[EXPECTED] > MOST_READ
        if not self._traffic.is_settled and self._is_busy(plan):
            return True
        is_sooner = figures.then.tpot_s <= SOONER * figures.keep.tpot_s
        return figures.read_share[MOST] > (MOST_SPARE if is_sooner else LITTLE_SPARE)

    def _is_busy(self, plan: _Plan) -> bool:
        """Whether there are more requests than instances: where too little is known, a group could be in their way."""
        requests = sum(self._table.state(row).running + self._table.state(row).waiting for row in plan.before)
        return requests > sum(group.degree for group in plan.change.before)


def _verbs(change: Change) -> tuple[str, ...]:
    """The switches that lead there: a tensor-parallel group of others needs these to end first."""
    ends_in = change.parts or alone(change.group.members)
    is_indirect = not change.is_merge and change.after != ends_in
    return (change.verb, "merge") if is_indirect else (change.verb,)
