"""Which change of the layout pays best, if any: what it saves, less the price of the way there and back."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pengserve.planners.columns import ReadyInstances
from pengserve.planners.judge.changes import Change
from pengserve.planners.judge.forecasts import KEEP, MOST_GROUPS, Forecast, Forecasts, Outcome
from pengserve.planners.judge.pricing import Prediction, Priced, Pricing
from pengserve.planners.judge.switch_costs import SwitchPrices, first_link
from pengserve.planners.judge.watch import Watched
from pengserve.planners.types.config import DropConfig, JudgeConfig
from pengserve.planners.types.layout import GroupKind
from pengserve.planners.types.snapshot import ClusterSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeHistory:
    """What the judge remembers from look to look. A value: a look returns the next one."""

    watched: Watched = field(default_factory=Watched)
    switches: SwitchPrices = field(default_factory=SwitchPrices)
    forecasts: Forecasts = field(default_factory=Forecasts)
    outcomes: tuple[Outcome, ...] = ()  # of the forecasts whose time was over at the newest look

    def seen(self, snapshot: ClusterSnapshot, instances: ReadyInstances, config: JudgeConfig) -> "JudgeHistory":
        """With this look."""
        watched, switches = self.watched.seen(snapshot, instances), self.switches.learned(snapshot)
        if not watched.is_known:
            return replace(self, watched=watched, switches=switches, outcomes=())
        forecasts, outcomes = self.forecasts.seen(snapshot, instances, watched.traffic(), config.horizon_s)
        return JudgeHistory(watched=watched, switches=switches, forecasts=forecasts, outcomes=outcomes)

    def knows(self, instances: ReadyInstances) -> bool:
        """Whether it can predict: requests have come, and steps of an instance that is alone have a price."""
        return self.watched.is_known and self.watched.costs(instances).of(GroupKind.DP) is not None

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


def judge(
    snapshot: ClusterSnapshot,
    instances: ReadyInstances,
    changes: Sequence[Change],
    config: JudgeConfig,
    drop: DropConfig,
    history: JudgeHistory,
) -> Judgement:
    """Prices `changes`; the best is that which saves most beyond the margin."""
    if not changes:
        return Judgement(history=history)
    watched, forecasts = history.watched, history.forecasts
    link = first_link(snapshot, drop)
    pricing = Pricing(
        snapshot,
        instances,
        watched.traffic(),
        watched.costs(instances),
        history.switches,
        config,
        link,
        forecasts.correction,
    )
    priced = pricing.price(changes)
    paying = [p for p in priced if p.gain_s > max(config.least_s, config.margin * p.keep.cost_s)]
    best = max(paying, key=lambda p: (p.gain_s, tuple(-m for m in p.change.group.members)), default=None)
    now_s = snapshot.time_s
    if best is not None:
        change = best.change
        rows = pricing.rows_after(change)
        forecast = Forecast(action=change.verb, groups=change.after, rows=rows, predicted=best.then, made_s=now_s)
        return Judgement(history=history.expecting(forecast), best=best, priced=priced)
    if forecasts.open:
        return Judgement(history=history, priced=priced)
    kept = pricing.keep(snapshot.layout.groups[:MOST_GROUPS])
    if kept is None:
        return Judgement(history=history, priced=priced)
    groups, rows, prediction = kept
    forecast = Forecast(action=KEEP, groups=groups, rows=rows, predicted=prediction, made_s=now_s)
    return Judgement(history=history.expecting(forecast), priced=priced, keep=prediction)
