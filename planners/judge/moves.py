"""Whether requests should move between instances that stand: priced as changes of the layout are.

The thresholds of `planners.migrate` propose who gives and who takes. What both will make of their requests is predicted
with the move and without it; a move is ordered where it saves request-seconds beyond the margin.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pengserve.planners.columns import group_table, ready_instances
from pengserve.planners.decision import Action, Decision, Option
from pengserve.planners.judge.forecasts import Forecast
from pengserve.planners.judge.judge import JudgeHistory, pricing_of
from pengserve.planners.judge.prediction import PricedMove
from pengserve.planners.types.config import DropConfig, JudgeConfig
from pengserve.planners.types.layout import Group
from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.snapshot import ClusterSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedMoves:
    """What was proposed, priced."""

    orders: tuple[Migrate, ...] = ()  # those that pay; all where nothing can be predicted
    decision: Decision | None = None  # the best of them, and the others; None where nothing was predicted
    forecast: Forecast | None = None  # of the best one that pays


def judge_moves(
    orders: Sequence[Migrate],
    snapshot: ClusterSnapshot,
    config: JudgeConfig,
    drop: DropConfig,
    history: JudgeHistory,
) -> JudgedMoves:
    """Those of `orders` that pay, with prices."""
    instances = ready_instances(snapshot.instances)
    is_known = history.watched.is_of_late(snapshot.time_s) and history.knows(instances)
    if not orders or not config.is_on or not is_known:
        return JudgedMoves(orders=tuple(orders))
    group_of = group_table(snapshot.layout.groups).group_of
    pricing = pricing_of(snapshot, instances, config, drop, history)
    known, wanted = list[Migrate](), list[tuple[Group, Group, float]]()
    for order in orders:
        source, target = (group_of.get(key.instance_id) for key in (order.source, order.target))
        if source is not None and target is not None:
            known.append(order)
            wanted.append((source, target, order.max_tokens))
    moves = pricing.moves(wanted)
    priced = [(move, order) for move, order in zip(moves, known, strict=True) if move is not None]
    if not priced:
        return JudgedMoves()
    priced.sort(key=lambda pair: (-pair[0].gain_s, pair[1].source))
    paying = [(move, order) for move, order in priced if move.gain_s > config.least(move.keep.cost_s)]
    found = _decision([move for move, _ in priced], bool(paying))
    if not paying:
        return JudgedMoves(decision=found)
    best, _ = paying[0]
    forecast = Forecast(
        action=Action.MIGRATE,
        groups=(best.source, best.target),
        rows=best.rows,
        predicted=best.then,
        made_s=snapshot.time_s,
        horizon_s=pricing.horizon_s,
    )
    return JudgedMoves(orders=tuple(order for _, order in paying), decision=found, forecast=forecast)


def _decision(moves: Sequence[PricedMove], is_any: bool) -> Decision:
    options = [_option(move) for move in moves]
    keep = Option(action=Action.KEEP, why="no move pays", prediction=moves[0].keep)
    return Decision(chosen=options[0] if is_any else keep, options=(keep, *options), is_judged=True)


def _option(move: PricedMove) -> Option:
    return Option(
        action=Action.MIGRATE,
        group=move.source,
        target=move.target,
        price_s=move.price_s,
        gain_s=move.gain_s,
        prediction=move.then,
        why=move.why,
    )
