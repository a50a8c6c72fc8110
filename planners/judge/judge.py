"""Which change of the layout pays best, if any: what it saves, less the price of the way there and back."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pengserve.planners.columns import ReadyInstances
from pengserve.planners.judge.changes import Change, What
from pengserve.planners.judge.forecasts import KEEP, MOST_GROUPS, Forecast, Forecasts, Outcome
from pengserve.planners.judge.prediction import Prediction, Priced
from pengserve.planners.judge.pricing import Pricing
from pengserve.planners.judge.standing import Needs, steadied
from pengserve.planners.judge.switch_costs import SwitchPrices, first_link
from pengserve.planners.judge.watch import Watched, costs_of, traffic_of
from pengserve.planners.types.config import DropConfig, JudgeConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import GroupKind, Layout
from pengserve.planners.types.snapshot import ClusterSnapshot

OWED = 2.0  # prices of a change that it must have been seen to save, where it saves little at once
LATER, DEARER = 1.1, 2.0  # what makes P99 TTFT so many times as late must gain so many times the least, at once
LEAST_SHARE = 0.03  # of what is predicted without a change; less is within the model's error
IDLE_S = 1e-3  # request-seconds within the horizon: nothing runs, and nothing comes
MOST_GAP_S = 1.0  # between two looks: what would have been saved longer ago is not known
SAME_LOOK_S = 0.1  # looks that follow each other so fast see the same: a controller asks again after each switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """Changes that pay, the best first, for the next calls of the same tick."""

    time_s: float
    layout: Layout
    paying: tuple[Priced, ...]
    forecasts: Mapping[Change, Forecast]
    claimed: frozenset[InstanceId]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeHistory:
    """What the judge remembers from look to look. A value: a look returns the next one."""

    watched: Watched = field(default_factory=Watched)
    switches: SwitchPrices = field(default_factory=SwitchPrices)
    forecasts: Forecasts = field(default_factory=Forecasts)
    ranked: Ranked | None = None  # of the newest look
    owed: Mapping[What, float] = field(default_factory=dict)  # request-seconds that would have been saved so far
    needs: Needs = field(default_factory=dict)  # for room, that changes would make
    judged_s: float = 0.0  # when changes were last priced
    outcomes: tuple[Outcome, ...] = ()  # of the forecasts whose time was over at the newest look

    def seen(self, snapshot: ClusterSnapshot, instances: ReadyInstances, config: JudgeConfig) -> "JudgeHistory":
        """With this look."""
        watched, switches = self.watched.seen(snapshot, instances), self.switches.learned(snapshot)
        if not watched.is_known:
            return replace(self, watched=watched, switches=switches, outcomes=())
        forecasts = self.forecasts.seen(snapshot, instances)
        return replace(self, watched=watched, switches=switches, forecasts=forecasts, outcomes=())

    def settled(self) -> "JudgeHistory":
        """With what became of forecasts whose time is over, where no price was asked for at this look."""
        if not self.forecasts.over:
            return self
        forecasts, outcomes = self.forecasts.settled(traffic_of(self.watched))
        return replace(self, forecasts=forecasts, outcomes=outcomes)

    def owed_now(self, priced: Sequence[Priced], now_s: float, horizon_s: float) -> dict[What, float]:
        """What each change would have saved since it began to gain without a break, if it had been made then."""
        share = min(MOST_GAP_S, max(0.0, now_s - self.judged_s)) / horizon_s
        gaining = (p for p in priced if p.gain_s > LEAST_SHARE * p.kept_s)
        return {p.change.what: self.owed.get(p.change.what, 0.0) + share * p.gain_s for p in gaining}

    def is_same_look(self, snapshot: ClusterSnapshot) -> bool:
        """Whether changes were ranked a moment ago, for the layout that still stands."""
        ranked = self.ranked
        if ranked is None or ranked.layout is not snapshot.layout or not snapshot.switching:
            return False
        return 0.0 <= snapshot.time_s - ranked.time_s <= SAME_LOOK_S

    def next_of(self, busy: frozenset[InstanceId]) -> tuple["JudgeHistory", Priced | None]:
        """The best of what was ranked that has no `busy` member; and what to remember then."""
        assert self.ranked is not None
        taken = busy.union(self.ranked.claimed)
        able = (p for p in self.ranked.paying if all(taken.isdisjoint(group.members) for group in p.change.before))
        best = next(able, None)
        if best is None:
            return self, None
        return self.expecting(self.ranked.forecasts[best.change]), best

    def knows(self, instances: ReadyInstances) -> bool:
        """Whether it can predict: requests have come, and steps of an instance that is alone have a price."""
        return self.watched.is_known and self._has_price(instances)

    def will_know(self, snapshot: ClusterSnapshot, instances: ReadyInstances) -> bool:
        """Whether it can predict in a moment: it has only just begun to watch requests that come, or waits for the
        first one, with instances that are alone and have a price. To merge these now would be a guess.
        """
        if self.watched.is_known:
            return False
        if instances.stat("total_requests").any():
            return True
        return self._has_price(instances) and all(group.kind is GroupKind.DP for group in snapshot.layout.groups)

    def _has_price(self, instances: ReadyInstances) -> bool:
        return costs_of(self.watched, instances).of(GroupKind.DP) is not None

    def expecting(self, forecast: Forecast) -> "JudgeHistory":
        """With one forecast more."""
        return replace(self, forecasts=replace(self.forecasts, open=(*self.forecasts.open, forecast)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The best change, and all that were priced."""

    history: JudgeHistory
    best: Priced | None = None  # None: nothing pays
    priced: tuple[Priced, ...] = ()
    keep: Prediction | None = None  # of the layout as it is, where that was predicted


def pays(priced: Priced, owed: Mapping[What, float], config: JudgeConfig) -> bool:
    """Whether a change gains much at once, or has been seen to gain for so long that it has paid for itself twice, and
    that it is not the model's error: from look to look a prediction of a queue may differ by more than the gain.

    What only makes use of spare compute must gain much: it costs throughput. What makes the slowest first tokens later
    must gain more still: where many answers run, a little sooner for each of their tokens adds up to much, and users
    judge a service by its tail.
    """
    least_s = config.least(priced.kept_s)
    if priced.then.slowest_s > LATER * priced.keep.slowest_s > 0.0:
        return priced.gain_s > DEARER * least_s
    if priced.gain_s > least_s:
        return True
    saved_s = owed.get(priced.change.what, 0.0)
    least_owed_s = max(config.least_s, OWED * priced.price_s, LEAST_SHARE * priced.kept_s)
    return not priced.change.is_spare and saved_s > least_owed_s


def readying(priced: Sequence[Priced], pricing: Pricing) -> list[Priced]:
    """Pipelines that should end where nothing runs and nothing comes: a request alone is to be served no later.

    A pipeline that reads long prompts sooner than its members stays, if prompts were long of late.
    """
    idle = [p for p in priced if p.change.verb == "restore" and p.keep.cost_s <= IDLE_S]
    saved_s = pricing.saved_alone_s([p.change for p in idle])
    return [p for p, alone_s in zip(idle, saved_s, strict=True) if alone_s >= 0.0]


def pricing_of(
    snapshot: ClusterSnapshot,
    instances: ReadyInstances,
    config: JudgeConfig,
    drop: DropConfig,
    history: JudgeHistory,
) -> Pricing:
    """The prices of one look, by what was watched."""
    watched = history.watched
    return Pricing(
        snapshot,
        instances,
        traffic_of(watched),
        costs_of(watched, instances),
        history.switches,
        config,
        first_link(snapshot, drop),
        history.forecasts,
    )


def judge(
    snapshot: ClusterSnapshot,
    instances: ReadyInstances,
    changes: Sequence[Change],
    config: JudgeConfig,
    drop: DropConfig,
    history: JudgeHistory,
    claimed: Collection[InstanceId] = (),
) -> Judgement:
    """Prices `changes`; the best is that which saves most beyond the margin.

    `claimed` members are needed for something else as long as this look lasts.
    """
    if not changes:
        return Judgement(history=replace(history, owed={}))
    pricing = pricing_of(snapshot, instances, config, drop, history)
    stands = snapshot.layout.groups[:MOST_GROUPS] if not history.forecasts.open else ()
    priced = pricing.price(changes, beside=stands)
    history = replace(history, forecasts=pricing.forecasts, outcomes=pricing.outcomes)
    now_s = snapshot.time_s
    priced, needs = steadied(priced, history.needs, instances, now_s)
    owed = history.owed_now(priced, now_s, pricing.horizon_s)
    history = replace(history, owed=owed, needs=needs, judged_s=now_s)
    paying, rest = list[Priced](), list[Priced]()
    for p in priced:
        (paying if pays(p, owed, config) else rest).append(p)
    paying += readying(rest, pricing)
    paying.sort(key=lambda p: (-p.gain_s, p.change.group.members))
    if paying:
        forecasts_of = {
            p.change: Forecast(
                action=p.change.verb,
                groups=p.change.after,
                rows=pricing.rows_after(p.change),
                predicted=p.then,
                made_s=now_s,
                horizon_s=pricing.horizon_s,
            )
            for p in paying
        }
        ranked = Ranked(
            time_s=now_s,
            layout=snapshot.layout,
            paying=tuple(paying),
            forecasts=forecasts_of,
            claimed=frozenset(claimed),
        )
        after = replace(history, ranked=ranked).expecting(forecasts_of[paying[0].change])
        return Judgement(history=after, best=paying[0], priced=priced)
    kept = pricing.keep(stands)
    if kept is None:
        return Judgement(history=history, priced=priced)
    groups, rows, prediction = kept
    forecast = Forecast(
        action=KEEP, groups=groups, rows=rows, predicted=prediction, made_s=now_s, horizon_s=pricing.horizon_s
    )
    return Judgement(history=history.expecting(forecast), priced=priced, keep=prediction)
