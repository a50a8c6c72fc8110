"""What the layout should become: planners decide from load, demand and memory, unless a user has pinned a layout."""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pengserve.controller.events import EventDraft
from pengserve.planners.check import check_switch
from pengserve.planners.groups import complete
from pengserve.planners.judge.forecasts import Outcome
from pengserve.planners.judge.moves import judge_moves
from pengserve.planners.pinned import plan_pinned
from pengserve.planners.selector import AT_REST, Action, Decision, Option, SelectorHistory, select
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.errors import PlanError
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind, Layout, parse_groups
from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.plans import LayoutTarget, SwitchPlan
from pengserve.planners.types.snapshot import ClusterSnapshot, Demand, LayoutPolicy
from pengserve.planners.types.strategy import SwitchStrategy

logger = logging.getLogger(__name__)

DEMAND_LIFETIME_S = 10.0  # an ingress that says nothing for so long wants nothing any more
SHORTAGE_PERIOD_S = 10.0  # between two events that tell of missing instances
MOVES_PERIOD_S = 10.0  # between two events that tell of requests that move from the same group to the same other one
SURPRISE = 1.5  # times as many request-seconds as were predicted, or as few
_SHOWN_GROUPS = 8


@dataclass(frozen=True, slots=True)
class _Heard:
    demand: Demand
    time_s: float


class Steering:
    """Keeps who decides, what ingresses want, and what the planner remembers. Does nothing by itself."""

    def __init__(self, config: ControllerConfig, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self._target: LayoutTarget | None = None
        self._is_auto = config.merge.is_auto
        self._history = SelectorHistory()
        self._decision = AT_REST
        self._moves, self._moves_s = AT_REST, -math.inf  # the newest decision about moves that was told, and when
        self._short_s = -math.inf  # when it was last told that instances are missing
        self._heard: dict[str, _Heard] = {}
        self._refused: tuple[str, ...] = ()  # the newest refusal, which is logged once

    @property
    def policy(self) -> LayoutPolicy:
        """Who decides about the layout."""
        return LayoutPolicy(is_auto=self._is_auto, target=self._target.groups if self._target else ())

    def demands(self) -> tuple[Demand, ...]:
        """Of the ingresses heard of lately."""
        now_s = self._clock()
        self._heard = {name: h for name, h in self._heard.items() if now_s - h.time_s <= DEMAND_LIFETIME_S}
        return tuple(heard.demand for heard in self._heard.values())

    def hear(self, client_id: str, demand: Demand) -> bool:
        """Takes in what an ingress wants; True where that cannot wait for the next tick."""
        before = self._heard.pop(client_id, None)
        if demand != Demand():
            self._heard[client_id] = _Heard(demand, self._clock())
        return _wishes(demand) and (before is None or _wishes(before.demand) != _wishes(demand))

    def pin(self, target: LayoutTarget, snapshot: ClusterSnapshot, possible: Iterable[Group]) -> EventDraft:
        """Lets `target` stand until it is asked otherwise. `possible` are the groups that the hardware allows.

        Raises:
            PlanError: this cluster can never be laid out so; says what it can.
        """
        groups = _valid(target.groups, snapshot, tuple(possible))
        self._target, self._is_auto = LayoutTarget(groups=groups, strategy=target.strategy), False
        text = " ".join(str(group) for group in groups if group.kind is not GroupKind.DP) or "dp"
        data = {"is_auto": False, "groups": text, "strategy": target.strategy.value}
        return EventDraft(kind=EventKind.POLICY_CHANGED, why=f"asked to keep {text}", data=data)

    def release(self) -> EventDraft:
        """Lets the planners decide again."""
        self._target, self._is_auto = None, True
        return EventDraft(kind=EventKind.POLICY_CHANGED, why="asked to follow the load", data={"is_auto": True})

    def remember(self, past: Iterable[Event]) -> None:
        """Takes over what an earlier controller was asked, from its log."""
        asked = [event for event in past if event.kind is EventKind.POLICY_CHANGED]
        if not asked:
            return
        data = asked[-1].data
        self._is_auto, self._target = True, None
        if data.get("is_auto", True):
            return
        try:
            self._target = self._target_of(data)
        except (KeyError, ValueError) as error:
            logger.warning("the layout that was asked for is forgotten, and the planners decide: %s", error)
            return
        self._is_auto = False

    def _target_of(self, data: Mapping[str, Any]) -> LayoutTarget:
        """What `pin` has logged. Raises KeyError or ValueError where it is for another cluster, or damaged."""
        text, ids = str(data["groups"]), [InstanceId(i) for i in range(self._config.num_instances)]
        groups = () if text == GroupKind.DP else parse_groups(text)
        if any(member not in ids for group in groups for member in group.members):
            raise ValueError(f"{text} needs more than {len(ids)} instances")
        return LayoutTarget(groups=complete(groups, ids), strategy=SwitchStrategy(data["strategy"]))

    def next_switch(
        self, snapshot: ClusterSnapshot, leaving: Collection[InstanceId] = ()
    ) -> tuple[SwitchPlan | None, tuple[EventDraft, ...]]:
        """The next switch to carry out, which breaks no law on `snapshot`, or None; and a new decision, for the log.

        Groups with `leaving` instances are dissolved first, and no other switch takes these along.
        """
        if leaving:
            plan = _dissolution(snapshot, leaving)
            if plan is not None and not check_switch(plan, snapshot):
                return plan, ()
        strategy = self._target.strategy if self._target is not None else SwitchStrategy.CARRY
        config = self._config
        plan, self._history, decision = select(
            snapshot,
            config.merge,
            config.drop,
            self._history,
            strategy,
            config.judge,
            redirects=config.migrate.redirects,
        )
        news = self._news(decision, snapshot.time_s)
        if plan is None or not set(plan.group.members).isdisjoint(leaving):
            return None, news
        violations = check_switch(plan, snapshot)
        if violations and violations != self._refused:
            logger.warning("plan %s was refused: %s", plan.plan_id, "; ".join(violations))
        self._refused = violations
        return (None if violations else plan), news

    def paying_moves(
        self, orders: tuple[Migrate, ...], snapshot: ClusterSnapshot
    ) -> tuple[tuple[Migrate, ...], tuple[EventDraft, ...]]:
        """Those of `orders` that save more than they cost, by what is predicted, or all where nothing can be; and the
        best of them, for the log: at once where it is another one than the last time, else once in a while.
        """
        history = self._history.judge
        found = judge_moves(orders, snapshot, self._config.judge, self._config.drop, history)
        decision, now_s = found.decision or AT_REST, self._clock()
        is_old = decision.is_same(self._moves) and now_s - self._moves_s < MOVES_PERIOD_S
        if is_old or decision.chosen.action is Action.KEEP:
            return found.orders, ()
        self._moves, self._moves_s = decision, now_s
        if found.forecast is not None:
            self._history = replace(self._history, judge=history.expecting(found.forecast))
        return found.orders, (decided(decision, snapshot.time_s),)

    def _news(self, decision: Decision, time_s: float) -> tuple[EventDraft, ...]:
        """The event of a decision that is another one than the last, and more than to rest.

        Memory may be short at every other look: that instances are missing is told once in a while.
        """
        before, self._decision = self._decision, decision
        outcomes = tuple(became(outcome) for outcome in decision.outcomes if _is_told(outcome))
        return (*outcomes, *self._decided(decision, before, time_s))

    def _decided(self, decision: Decision, before: Decision, time_s: float) -> tuple[EventDraft, ...]:
        has_choice = self._config.drop.max_stages > 1 or decision.is_judged
        if not has_choice or decision.is_rest or decision.is_same(before):
            return ()
        if decision.chosen.action is Action.KEEP:
            now_s = self._clock()
            if now_s - self._short_s < SHORTAGE_PERIOD_S:
                self._decision = AT_REST  # it is told later, if it lasts
                return ()
            self._short_s = now_s
        return (decided(decision, time_s),)


def decided(decision: Decision, time_s: float) -> EventDraft:
    """The event of a decision at `time_s`. The event of its outcome has the same span."""
    options = [_shown(option) for option in decision.options]
    data = {**_shown(decision.chosen), "needs_instances": decision.needs_instances, "options": options}
    span = _span(time_s) if decision.is_judged else ""
    return EventDraft(kind=EventKind.PLAN_DECIDED, why=decision.chosen.why, span=span, data=data)


def _span(made_s: float) -> str:
    return f"decision:{made_s:.2f}"


def became(outcome: Outcome) -> EventDraft:
    """The event of a prediction whose horizon is over."""
    measured, predicted = outcome.measured, outcome.predicted
    data = {
        "action": outcome.action,
        "groups": " ".join(map(str, outcome.groups[:_SHOWN_GROUPS])),
        "predicted": _figures(predicted.ttft_s, predicted.tpot_s, predicted.queue, predicted.finished),
        "measured": _figures(measured.ttft_s, measured.tpot_s, measured.queue, measured.finished),
        "error": round(outcome.error, 3),
    }
    why = (
        f"TTFT {measured.ttft_s:.2f} s, {predicted.ttft_s:.2f} were predicted;"
        f" TPOT {measured.tpot_s * 1e3:.1f} ms, {predicted.tpot_s * 1e3:.1f} were predicted"
    )
    return EventDraft(kind=EventKind.PLAN_OUTCOME, why=why, span=_span(outcome.made_s), data=data)


def _is_told(outcome: Outcome) -> bool:
    """Of what was kept, only surprises: the log has changes, and no heartbeats."""
    return outcome.action != Action.KEEP or abs(math.log(outcome.error)) > math.log(SURPRISE)


def _shown(option: Option) -> dict[str, Any]:
    group = " -> ".join(str(group) for group in (option.group, option.target) if group is not None)
    found: dict[str, Any] = {
        "action": option.action.value,
        "group": group,
        "price_s": round(option.price_s, 3),
        "why": option.why,
    }
    predicted = option.prediction
    if predicted is not None:
        figures = _figures(predicted.ttft_s, predicted.tpot_s, predicted.queue, predicted.finished)
        recomputed = round(predicted.recomputed_tokens)
        found |= {"gain_s": round(option.gain_s, 3), "predicted": figures | {"recomputed_tokens": recomputed}}
    return found


def _figures(ttft_s: float, tpot_s: float, queue: float, finished: float) -> dict[str, float]:
    """Of some groups within the horizon: mean seconds, requests that wait at the end, and requests that ended."""
    return {
        "ttft_s": round(ttft_s, 4),
        "tpot_s": round(tpot_s, 5),
        "queue": round(queue, 1),
        "finished": round(finished, 1),
    }


def _dissolution(snapshot: ClusterSnapshot, leaving: Collection[InstanceId]) -> SwitchPlan | None:
    """The next switch after which these instances are alone; None where there is none, or it must wait."""
    rest = [group for group in snapshot.layout.groups if not set(group.members).intersection(leaving)]
    who = ", ".join(map(str, sorted(leaving)))
    target = complete(rest, snapshot.ranks)
    return plan_pinned(snapshot, target, SwitchStrategy.CARRY, f"instance {who} is being drained")


def _wishes(demand: Demand) -> tuple[int, tuple[tuple[int, int], ...], int]:
    """What a group must be formed for, as far as it calls for haste."""
    return demand.longest_waiting_tokens, demand.wanted_degrees, demand.num_priority


def _valid(groups: tuple[Group, ...], snapshot: ClusterSnapshot, possible: tuple[Group, ...]) -> tuple[Group, ...]:
    """`groups`, with a dp group for each instance that they leave out; raises PlanError."""
    ranks = snapshot.ranks
    try:
        Layout(epoch=snapshot.epoch, groups=groups)
    except ValueError as error:
        raise PlanError(f"{error}; name each instance once") from None
    for group in groups:
        strangers = [member for member in group.members if member not in ranks]
        if strangers:
            raise PlanError(f"there is no instance {strangers[0]}: choose among {min(ranks)} to {max(ranks)}")
        if group.kind is GroupKind.DP:
            continue
        if group not in possible:
            raise PlanError(f"{group} cannot be formed: {_choices(possible)}")
        _require_lanes(group, snapshot)
    return complete(groups, ranks)


def _require_lanes(group: Group, snapshot: ClusterSnapshot) -> None:
    """Raises PlanError where a member has said that it cannot build the lane."""
    for instance in snapshot.instances:
        for lane in instance.lanes if instance.instance_id in group.members else ():
            if lane.shape == group.shape and lane.capacity is None:
                raise PlanError(f"instance {instance.key} cannot run {group.shape}: {lane.why_not}")


def _choices(possible: tuple[Group, ...]) -> str:
    if not possible:
        return "no tensor-parallel group is possible here; choose dp, or start the instances with degrees to build"
    more = f" and {len(possible) - _SHOWN_GROUPS} more" if len(possible) > _SHOWN_GROUPS else ""
    return f"choose among {' '.join(str(group) for group in possible[:_SHOWN_GROUPS])}{more}"
