"""The price of each change: what becomes of its groups with it and without it, at few, expected and many requests."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log, sqrt

import numpy as np

from pengserve.planners.columns import ReadyInstances, lane_capacity
from pengserve.planners.judge.changes import Change
from pengserve.planners.judge.costs import Costs
from pengserve.planners.judge.fluid import WAIT_WEIGHT, Fate, Rows, predict
from pengserve.planners.judge.switch_costs import SwitchPrices
from pengserve.planners.judge.watch import Traffic
from pengserve.planners.types.config import JudgeConfig
from pengserve.planners.types.layout import Group, GroupKind, alone
from pengserve.planners.types.snapshot import ClusterSnapshot

MOST_READ = 0.8  # share of a pipeline's time that prompts may take: beyond it compute is short, and not memory
# Share of a group's time that prompts may take where it is formed for latency, even if many requests come.
MOST_SPARE_TP, MOST_SPARE_PP = 0.5, 0.4
MOVE_S = 0.05  # that a request stalls which goes to another instance while both serve: for the last of its KV
FEW, EXPECTED, MANY = range(3)  # scenarios: how many requests come


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What becomes of some groups within the horizon, at the expected rate of requests."""

    cost_s: float = 0.0  # request-seconds, see `judge.fluid`
    ttft_s: float = 0.0  # mean
    tpot_s: float = 0.0  # mean
    queue: float = 0.0  # requests that wait at the end
    finished: float = 0.0  # requests
    recomputed_tokens: float = 0.0
    missed: float = 0.0  # requests beyond their limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A change, and what it does."""

    change: Change
    keep: Prediction  # of its groups as they are
    then: Prediction  # ... and as they would be
    price_s: float  # request-seconds that the switches there and back cost
    gain_s: float  # request-seconds saved, less the price: at expected load, less half of the regret at another load

    @property
    def why(self) -> str:
        """One sentence for people."""
        return (
            f"{self.change.why}: {self.gain_s:.1f} request-seconds saved of {self.keep.cost_s:.1f},"
            f" TTFT {self.keep.ttft_s:.2f} -> {self.then.ttft_s:.2f} s,"
            f" TPOT {self.keep.tpot_s * 1e3:.1f} -> {self.then.tpot_s * 1e3:.1f} ms"
        )


@dataclass(frozen=True, slots=True)
class _State:
    """What a group runs and queues, or would; counts are spread where it does not exist yet."""

    running: float = 0.0
    held_tokens: float = 0.0
    waiting: float = 0.0
    waiting_tokens: float = 0.0

    def __add__(self, other: "_State") -> "_State":
        return _State(
            self.running + other.running,
            self.held_tokens + other.held_tokens,
            self.waiting + other.waiting,
            self.waiting_tokens + other.waiting_tokens,
        )

    def share(self, part: float) -> "_State":
        return _State(self.running * part, self.held_tokens * part, self.waiting * part, self.waiting_tokens * part)


class Pricing:
    """One look's working state: rows of the fluid model, one for each group now and each that could be."""

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
        self._instances, self._traffic, self._costs, self._switches = instances, traffic, costs, switches
        self._config, self._link, self._correction = config, link_bytes_per_s, correction
        self._factors: list[float] = []
        self._rows: list[tuple[float, ...]] = []
        self._shapes: list[str] = []  # the shape of each row
        self._terms_of: dict[str, tuple[float, ...]] = {}
        self._of: dict[Group, int] = {}
        self._rows_after: dict[Change, tuple[int, ...]] = {}
        self._num_members = max(1, len(instances))
        self._limits, self._miss_s = (0.0, 0.0), 0.0
        self._spread = sqrt(log(max(1.0, traffic.pairs / max(1.0, traffic.prompt_tokens))))
        self._num_routes = max(1, len(snapshot.layout.groups))
        self._outside = sum(d.num_waiting for d in snapshot.demands if not d.longest_waiting_tokens)
        self._bytes_per_token = 0.0
        first = next(iter(instances.values()), None)
        alone_lane = lane_capacity(first, GroupKind.DP)
        if alone_lane is not None:
            self._bytes_per_token = alone_lane.bytes_per_block / max(1, alone_lane.block_size)

    def price(self, changes: Sequence[Change]) -> tuple[Priced, ...]:
        """Those of `changes` that can be predicted, in their order."""
        plans = [plan for change in changes if (plan := self._rows_of(change)) is not None]
        if not plans:
            return ()
        self._set_limits()
        fates = self._fates((FEW, EXPECTED, MANY))
        self._rows_after = {plan.change: plan.after for plan in plans}
        return tuple(self._priced(plan, fates) for plan in plans)

    def move(self, source: Group, target: Group, num_tokens: float) -> tuple[float, float]:
        """What it saves that running requests with so many tokens of KV go from one group to another, in
        request-seconds, and what is predicted without it; 0 where it cannot be predicted.
        """
        kept, free = self._state(source), self._state(target)
        part = min(1.0, num_tokens / max(1.0, kept.held_tokens))
        moved = _State(kept.running * part, kept.held_tokens * part)
        rest = _State(
            kept.running - moved.running, kept.held_tokens - moved.held_tokens, kept.waiting, kept.waiting_tokens
        )
        states = ((source, kept), (target, free), (source, rest), (target, free + moved))
        found = (self._row(group, state, 0.0, self._num_routes) for group, state in states)
        rows = [row for row in found if row is not None]
        if len(rows) < len(states):
            return 0.0, 0.0
        self._set_limits()
        cost_s = self._fates((EXPECTED,))[0].cost_s[rows]
        return float(cost_s[:2].sum() - cost_s[2:].sum()) - MOVE_S * moved.running, float(cost_s[:2].sum())

    def rows_after(self, change: Change) -> Rows:
        """What a priced change leads to, at the expected rate of requests."""
        return _some(self._expected, list(self._rows_after[change]))

    def keep(self, groups: Sequence[Group]) -> tuple[tuple[Group, ...], Rows, Prediction] | None:
        """Those of `groups`, of the layout, that can be predicted; and what becomes of them as they are."""
        at = {group: row for group in groups if (row := self._row_now(group)) is not None}
        if not at:
            return None
        rows = list(at.values())
        self._set_limits()
        return tuple(at), _some(self._scenario(EXPECTED), rows), _sum(self._fates((EXPECTED,))[0], rows)

    def _set_limits(self) -> None:
        """Limits are multiples of what the fastest of the shapes gives a request that is alone."""
        traffic, config = self._traffic, self._config
        prompt = traffic.prompt_tokens * exp(-0.5 * self._spread**2)
        costs = [cost for shape in self._terms_of if (cost := self._costs.of(shape)) is not None]
        first_s = min(cost.step_s(prompt, 1, prompt, prompt * prompt) for cost in costs)
        token_s = min(cost.step_s(1, 1, traffic.prompt_tokens) for cost in costs)
        self._limits = config.slo_scale * first_s, config.slo_scale * token_s
        self._miss_s = config.miss_weight * (first_s + traffic.output_tokens * token_s)

    def _fates(self, scenarios: Sequence[int]) -> list[Fate]:
        """The fate of every row in each scenario. To predict all rows together takes hardly longer than one row."""
        each = [self._scenario(scenario) for scenario in scenarios]
        self._expected = each[scenarios.index(EXPECTED)]
        names, count = [f.name for f in fields(Rows)], len(self._rows)
        fate = predict(
            Rows(**{name: np.concatenate([getattr(rows, name) for rows in each]) for name in names}),
            self._config.horizon_s,
        )
        fate = replace(fate, cost_s=fate.cost_s * np.tile(self._factors, len(each)))
        return [
            Fate(**{f.name: getattr(fate, f.name)[at * count : (at + 1) * count] for f in fields(Fate)})
            for at in range(len(each))
        ]

    # Rows -------------------------------------------------------------------------------------------------------------

    def _rows_of(self, change: Change) -> "_Plan | None":
        before = [self._row_now(group) for group in change.before]
        states = [self._state(group) for group in change.before]
        known = [row for row in before if row is not None]
        if len(known) < len(before) or not known:
            return None
        whole = sum(states[1:], states[0])
        members = sum(group.degree for group in change.before)
        there_s, back_s = self._stalls(change, whole)
        num_routes = self._num_routes + len(change.after) - len(change.before)
        after = []
        for group, state in zip(change.after, self._spread_over(whole, change.after, members), strict=True):
            row = self._row(group, state, there_s, num_routes)
            if row is None:
                return None
            after.append(row)
        return _Plan(change, tuple(known), tuple(after), there_s, back_s)

    def _spread_over(self, whole: _State, groups: Sequence[Group], members: int) -> Iterator[_State]:
        """What each of `groups` will run: as many requests a member, which are not equally long.

        The first one stands for the one that gets the longest ones.
        """
        sizes = self._traffic.prompt_tokens + np.array(self._traffic.ages)
        each = whole.running / max(1, len(groups))
        more = min(1.0, float(sizes.std() / sizes.mean()) / sqrt(max(1.0, each))) if len(groups) > 1 else 0.0
        for at, group in enumerate(groups):
            state = whole.share(group.degree / members)
            share = more if at == 0 else -more / (len(groups) - 1)
            yield replace(state, held_tokens=state.held_tokens * (1.0 + share))

    def _stalls(self, change: Change, whole: _State) -> tuple[float, float]:
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

    def _row_now(self, group: Group) -> int | None:
        if group not in self._of:
            row = self._row(group, self._state(group), 0.0, self._num_routes)
            if row is None:
                return None
            self._of[group] = row
        return self._of[group]

    def _row(self, group: Group, state: _State, stall_s: float, num_routes: int) -> int | None:
        cost = self._costs.of(group.shape)
        lanes = [lane_capacity(self._instances.get(m), group.shape) for m in group.members]
        lane = min((lane for lane in lanes if lane is not None), key=lambda lane: lane.num_blocks, default=None)
        if cost is None or lane is None or None in lanes:
            return None
        servers = group.degree if group.kind is GroupKind.PP else 1
        self._shapes.append(group.shape)
        self._terms_of[group.shape] = cost.terms
        self._factors.append(self._correction(group.shape))
        self._rows.append(
            (
                servers,
                lane.num_tokens,
                lane.max_num_seqs,
                state.running,
                state.held_tokens,
                state.waiting,
                state.waiting_tokens,
                stall_s,
                group.degree / self._num_members,
                num_routes,
            )
        )
        return len(self._rows) - 1

    def _state(self, group: Group) -> _State:
        leader = self._instances[group.leader]
        stats, lane = leader.stats, lane_capacity(leader, group.shape)
        block_size = stats.block_size or (lane.block_size if lane is not None else 1)
        outside = self._outside * group.degree / self._num_members
        paused = sum(self._instances[m].stats.num_paused for m in group.members if m in self._instances)
        waiting = stats.num_waiting + outside + paused
        return _State(
            running=stats.num_running,
            held_tokens=stats.kv_blocks_used * block_size,
            waiting=waiting,
            waiting_tokens=stats.queued_tokens + (outside + paused) * self._traffic.prompt_tokens,
        )

    def _scenario(self, scenario: int) -> Rows:
        columns = np.array(self._rows, dtype=np.float64).T
        servers, kv, slots, running, held, waiting, waiting_tokens, stall_s, share, routes = columns
        traffic, ones = self._traffic, np.ones(len(self._rows))
        return Rows(
            servers=servers,
            cost=np.array(list(map(self._terms_of.__getitem__, self._shapes))),
            kv_tokens=kv,
            slots=slots,
            running=running,
            held_tokens=held,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            stall_s=stall_s,
            rate=(traffic.rate_now if scenario == EXPECTED else traffic.rates[scenario]) * share,
            later_rate=traffic.rates[scenario] * share,
            burst_s=traffic.burst_s * ones,
            prompt_tokens=traffic.prompt_tokens * ones,
            read_share=traffic.read_share * ones,
            output_tokens=traffic.output_tokens * ones,
            output_spread=traffic.output_spread * ones,
            ages=np.repeat(np.array([traffic.ages]), len(ones), axis=0),
            pairs=traffic.pairs * ones,
            spread=self._spread * ones,
            ttft_limit_s=self._limits[0] * ones,
            tpot_limit_s=self._limits[1] * ones,
            miss_s=self._miss_s * ones,
            routes=routes,
        )

    # Prices -----------------------------------------------------------------------------------------------------------

    def _priced(self, plan: "_Plan", fates: Sequence[Fate]) -> Priced:
        before, after = list(plan.before), list(plan.after)
        rate = self._traffic.rates[EXPECTED] * sum(group.degree for group in plan.change.before) / self._num_members
        gains, price_s = [], 0.0
        for scenario, fate in enumerate(fates):
            # On the way back all that runs then stalls once more, and what comes meanwhile waits.
            back_s = plan.back_s * (float(fate.running[after].sum()) + WAIT_WEIGHT * rate * plan.back_s / 2.0)
            gains.append(float(fate.cost_s[before].sum() - fate.cost_s[after].sum()) - back_s)
            if scenario == EXPECTED:
                there_s = plan.there_s * sum(self._rows[row][3] for row in before)
                price_s = there_s + back_s
        # Queues grow with the square of what is too much: what would be gained in the worst case must not decide.
        expected_s = min(gains[EXPECTED], (gains[FEW] + gains[EXPECTED]) / 2.0)
        regret_s = max(0.0, -min(gains))
        if self._is_short_of_compute(plan, fates):
            expected_s = min(expected_s, 0.0)  # it is not to be taken
        return Priced(
            change=plan.change,
            keep=_sum(fates[EXPECTED], before),
            then=_sum(fates[EXPECTED], after),
            price_s=price_s,
            gain_s=expected_s - self._config.regret * regret_s,
        )

    def _is_short_of_compute(self, plan: "_Plan", fates: Sequence[Fate]) -> bool:
        """Whether a change forms a group though prompts take most of the time: it computes less than its members."""
        if not any(group.degree > 1 for group in plan.change.after) or plan.change.verb == "restore":
            return False
        if plan.change.is_spare and not self._traffic.is_settled and self._is_busy(plan):
            return True
        is_tp = any(group.kind is GroupKind.TP for group in plan.change.after)
        spare = MOST_SPARE_TP if is_tp else MOST_SPARE_PP
        scenario, most = (MANY, spare) if plan.change.is_spare else (EXPECTED, MOST_READ)
        return float(fates[scenario].read_share[list(plan.after)].max()) > most

    def _is_busy(self, plan: "_Plan") -> bool:
        """Whether there are more requests than instances: where too little is known, a group could be in their way."""
        requests = sum(self._rows[row][3] + self._rows[row][5] for row in plan.before)
        return requests > sum(group.degree for group in plan.change.before)


@dataclass(frozen=True, slots=True)
class _Plan:
    change: Change
    before: tuple[int, ...]  # rows
    after: tuple[int, ...]
    there_s: float
    back_s: float


def _verbs(change: Change) -> tuple[str, ...]:
    """The switches that lead there: a tensor-parallel group of others needs these to end first."""
    is_indirect = change.verb == "split" and change.after != alone(change.group.members)
    return ("split", "merge") if is_indirect else (change.verb,)


def _some(rows: Rows, at: list[int]) -> Rows:
    return Rows(**{f.name: getattr(rows, f.name)[at] for f in fields(rows)})


def _sum(fate: Fate, at: list[int]) -> Prediction:
    begun = fate.finished[at] + fate.running[at] + 1e-9
    return Prediction(
        cost_s=float(fate.cost_s[at].sum()),
        ttft_s=float((fate.ttft_s[at] * begun).sum() / begun.sum()),
        tpot_s=float((fate.tpot_s[at] * begun).sum() / begun.sum()),
        queue=float(fate.queue[at].sum()),
        finished=float(fate.finished[at].sum()),
        recomputed_tokens=float(fate.recomputed_tokens[at].sum()),
        missed=float(fate.missed[at].sum()),
    )
