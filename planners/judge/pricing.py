"""The price of each change: what becomes of its groups with it and without it, at few, expected and many requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pengserve.planners.columns import Floats, ReadyInstances, lane_capacity
from pengserve.planners.judge.changes import Change
from pengserve.planners.judge.costs import Costs
from pengserve.planners.judge.fluid import WAIT_WEIGHT, Fate
from pengserve.planners.judge.group_state import GroupState, GroupStates
from pengserve.planners.judge.prediction import Prediction, Priced, PricedMove
from pengserve.planners.judge.row_table import EXPECTED, FEW, MOST, RowTable
from pengserve.planners.judge.rows import Rows
from pengserve.planners.judge.switch_costs import SwitchPrices
from pengserve.planners.judge.watch import Traffic
from pengserve.planners.types.config import JudgeConfig
from pengserve.planners.types.layout import Group, GroupKind, alone
from pengserve.planners.types.snapshot import ClusterSnapshot

MOST_READ = 1.0  # share of a pipeline's time that prompts may take: beyond it compute is short, and not memory
# Share of a group's time that prompts may take where it is formed for latency, even if many requests come.
MOST_SPARE = 0.4
MOVE_S = 0.05  # that a request stalls which goes to another instance while both serve: for the last of its KV


@dataclass(frozen=True, slots=True)
class _Plan:
    """A change as rows of the model."""

    change: Change
    before: tuple[int, ...]
    after: tuple[int, ...]
    there_s: float  # that requests stall on the way there,
    back_s: float  # ... and on the way back


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
        correction: Callable[[str], float] = lambda shape: 1.0,
    ) -> None:
        """`correction`: factor on request-seconds of a shape, by which the model was wrong of late."""
        self._traffic, self._switches, self._config, self._link = traffic, switches, config, link_bytes_per_s
        self._states = GroupStates(snapshot, instances, traffic)
        self._table = RowTable(instances, traffic, costs, config, correction)
        self._row_of: dict[Group, int] = {}  # of groups as they are
        self._rows_after: dict[Change, tuple[int, ...]] = {}
        self._num_members = max(1, len(instances))
        self._num_routes = max(1, len(snapshot.layout.groups))
        lane = lane_capacity(next(iter(instances.values()), None), GroupKind.DP)
        self._bytes_per_token = 0.0 if lane is None else lane.bytes_per_block / max(1, lane.block_size)

    @property
    def horizon_s(self) -> float:
        """What is predicted."""
        return self._table.horizon_s

    def price(self, changes: Sequence[Change]) -> tuple[Priced, ...]:
        """Those of `changes` that can be predicted, in their order."""
        plans = [plan for change in changes if (plan := self._plan_of(change)) is not None]
        if not plans:
            return ()
        fates = self._table.fates()
        self._rows_after = {plan.change: plan.after for plan in plans}
        costs_s, running = np.stack([fate.cost_s for fate in fates]), np.stack([fate.running for fate in fates])
        return tuple(self._priced(plan, fates, costs_s, running) for plan in plans)

    def move(self, source: Group, target: Group, num_tokens: float) -> PricedMove | None:
        """Running requests with so many tokens of KV change their group; None where it cannot be predicted."""
        kept, free = self._states.now(source), self._states.now(target)
        rest, moved = kept.parted(num_tokens)
        states = ((source, kept), (target, free), (source, rest), (target, free + moved))
        found = (self._table.add(group, state, 0.0, self._num_routes) for group, state in states)
        rows = [row for row in found if row is not None]
        if len(rows) < len(states):
            return None
        fate, price_s = self._table.fates((EXPECTED,))[0], MOVE_S * moved.running
        keep, then = Prediction.of(fate, rows[:2]), Prediction.of(fate, rows[2:])
        return PricedMove(
            source=source,
            target=target,
            num_requests=moved.running,
            keep=keep,
            then=then,
            rows=self._table.expected(rows[2:]),
            price_s=price_s,
            gain_s=keep.cost_s - then.cost_s - price_s,
        )

    def saved_alone_s(self, change: Change) -> float:
        """Request-seconds that a change saves one usual request, if that comes now and is alone; 0 if not known."""
        one = GroupState(waiting=1.0, waiting_tokens=self._traffic.prompt_tokens)
        rows = [self._table.add(groups[0], one, 0.0, self._num_routes) for groups in (change.before, change.after)]
        before, after = rows
        if before is None or after is None:
            return 0.0
        cost_s = self._table.fates((EXPECTED,))[0].cost_s
        return float(cost_s[before] - cost_s[after])

    def rows_after(self, change: Change) -> Rows:
        """What a priced change leads to, at the expected rate of requests."""
        return self._table.expected(self._rows_after[change])

    def keep(self, groups: Sequence[Group]) -> tuple[tuple[Group, ...], Rows, Prediction] | None:
        """Those of `groups`, of the layout, that can be predicted; and what becomes of them as they are."""
        at = {group: row for group in groups if (row := self._row_now(group)) is not None}
        if not at:
            return None
        rows = list(at.values())
        return tuple(at), self._table.expected(rows), Prediction.of(self._table.fates((EXPECTED,))[0], rows)

    # Rows -------------------------------------------------------------------------------------------------------------

    def _plan_of(self, change: Change) -> _Plan | None:
        before = [row for group in change.before if (row := self._row_now(group)) is not None]
        if len(before) < len(change.before) or not before:
            return None
        states = [self._table.state(row) for row in before]
        whole, num_members = sum(states[1:], states[0]), sum(group.degree for group in change.before)
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

    def _priced(self, plan: _Plan, fates: Sequence[Fate], costs_s: Floats, running: Floats) -> Priced:
        """`costs_s`, `running`: of `fates`, `[scenario, row]`."""
        before, after = list(plan.before), list(plan.after)
        saved_s = (costs_s[:, before].sum(axis=1) - costs_s[:, after].sum(axis=1)).tolist()
        left = running[:, after].sum(axis=1).tolist()
        rate = (
            self._traffic.coming.expected.later * sum(group.degree for group in plan.change.before) / self._num_members
        )
        gains, price_s, is_spare = [], 0.0, self._is_spare(plan, fates)
        # What only makes use of spare compute must bear as many requests as came at once before.
        for scenario in range(len(fates) if is_spare else MOST):
            # On the way back all that runs then stalls once more, and what comes meanwhile waits.
            back_s = plan.back_s * (left[scenario] + WAIT_WEIGHT * rate * plan.back_s / 2.0)
            gains.append(saved_s[scenario] - back_s)
            if scenario == EXPECTED:
                there_s = plan.there_s * sum(self._table.state(row).running for row in before)
                price_s = there_s + back_s
        # Queues grow with the square of what is too much: what would be gained in the worst case must not decide.
        expected_s, kept_s = gains[EXPECTED], float(costs_s[EXPECTED, before].sum())
        if gains[FEW] < gains[EXPECTED]:
            expected_s = (gains[FEW] + gains[EXPECTED]) / 2.0
            # Of a tensor-parallel group, which computes less than its members, the margin is of the expected load.
            if all(group.kind is not GroupKind.TP for group in plan.change.after):
                kept_s = (float(costs_s[FEW, before].sum()) + kept_s) / 2.0
        regret_s = max(0.0, -min(gains))
        if self._is_short_of_compute(plan, fates, is_spare):
            expected_s = min(expected_s, 0.0)  # it is not to be taken
        return Priced(
            change=plan.change,
            keep=Prediction.of(fates[EXPECTED], before),
            then=Prediction.of(fates[EXPECTED], after),
            price_s=price_s,
            gain_s=expected_s - self._config.regret * regret_s,
            kept_s=kept_s,
        )

    def _is_spare(self, plan: _Plan, fates: Sequence[Fate]) -> bool:
        """Whether a change only makes use of spare compute. A pipeline is for memory where memory will run out: no
        less than one that is planned when it has.
        """
        is_pp = any(group.kind is GroupKind.PP for group in plan.change.after)
        return plan.change.is_spare and not (is_pp and float(fates[EXPECTED].full_s[list(plan.before)].min()) > 0.0)

    def _is_short_of_compute(self, plan: _Plan, fates: Sequence[Fate], is_spare: bool) -> bool:
        """Whether a change forms a group though prompts take most of the time, as it computes less than its members; or
        before it is known how much they take.
        """
        if not any(group.degree > 1 for group in plan.change.after) or plan.change.verb == "restore":
            return False
        if is_spare and not self._traffic.is_settled and self._is_busy(plan):
            return True
        scenario, most = (MOST, MOST_SPARE) if is_spare else (EXPECTED, MOST_READ)
        return float(fates[scenario].read_share[list(plan.after)].max()) > most

    def _is_busy(self, plan: _Plan) -> bool:
        """Whether there are more requests than instances: where too little is known, a group could be in their way."""
        requests = sum(self._table.state(row).running + self._table.state(row).waiting for row in plan.before)
        return requests > sum(group.degree for group in plan.change.before)


def _verbs(change: Change) -> tuple[str, ...]:
    """The switches that lead there: a tensor-parallel group of others needs these to end first."""
    is_indirect = change.verb == "split" and change.after != alone(change.group.members)
    return ("split", "merge") if is_indirect else (change.verb,)
