"""The one arbiter of the layout: which of merge, split, drop and restore comes next, so that plans never fight.

The first that is due, and each one on what those before it leave alone:

    1. merge, split    for requests that are too long, urgent, or ask for a shape: their groups are theirs
    2. drop            where memory is short, or will be in a moment
    3. split, merge    for load; no group that is short of memory is merged for load
    4. restore         where memory is plenty, and short nowhere

Switches whose groups have no member in common are carried out side by side: a call plans what members of those under
way have no part in. Merges and splits for load, wishes and long requests come one after another all the same, as each
changes what the next should be.

Where a user has pinned a layout, the rules above rest, and the next switch is one that leads to that layout.

Every option has a price, in seconds that requests stall, added up over all requests: those whose KV a switch moves, for
as long as that takes; and those that find no memory after it, for `min_dwell_s` each, as that is when the layout is
judged anew. The order above decides, and prices decide between options of one kind; they are there for people to see
what else was possible, and what it would have cost.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from pengserve.planners.columns import ReadyInstances, group_table, ready_instances
from pengserve.planners.drop import Verdict, plan_drop
from pengserve.planners.judge.changes import Change, drop_changes, pp_changes, restore_changes, tp_changes
from pengserve.planners.judge.forecasts import Outcome
from pengserve.planners.judge.judge import JudgeHistory, Judgement, judge
from pengserve.planners.judge.pricing import Prediction, Priced
from pengserve.planners.merge import LoadHistory, Proposal, Reason, propose
from pengserve.planners.overload import DemandHistory, MemoryDemand, predict_demand
from pengserve.planners.pinned import plan_pinned
from pengserve.planners.prices import Prices, demands_over
from pengserve.planners.restore import RestoreHistory, RestorePlan, plan_restore
from pengserve.planners.steps import is_backing_off, make_plan, next_step
from pengserve.planners.types.config import DropConfig, JudgeConfig, MergeConfig
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.plans import SwitchPlan, SwitchStrategy
from pengserve.planners.types.snapshot import ClusterSnapshot

JUDGE = JudgeConfig()
SHOWN_DROPS = 4  # options of one look; a thousand instances may call for hundreds


class Action(StrEnum):
    """What can be done about the layout: nothing, or what `SwitchPlan.verb` says."""

    KEEP = "keep"
    MERGE = "merge"
    SPLIT = "split"
    DROP = "drop"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One thing that could be done now."""

    action: Action
    group: Group | None = None  # None: nothing is done
    price_s: float = 0.0  # seconds that requests stall, over all requests
    gain_s: float = 0.0  # request-seconds that are saved within the horizon, less the price
    prediction: Prediction | None = None  # of its groups with it; None: nothing was predicted
    why: str = ""  # one sentence for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is done, and what else was possible."""

    chosen: Option
    options: tuple[Option, ...] = ()  # all that were considered, the chosen one among them
    needs_instances: bool = False  # memory is short, and dropping parameters does not help, or not enough
    is_judged: bool = False  # options were compared by what they will gain, and not by the order of the rules
    outcomes: tuple[Outcome, ...] = ()  # of earlier decisions, whose horizon is over

    def is_same(self, other: "Decision") -> bool:
        """Whether both say to do the same. Prices differ from look to look."""
        mine = self.chosen.action, self.chosen.group, self.needs_instances
        return mine == (other.chosen.action, other.chosen.group, other.needs_instances)

    @property
    def is_rest(self) -> bool:
        """Whether nothing is to be done, nothing is missing, and no memory that is short could be had."""
        could_drop = self.is_judged and any(option.action is Action.DROP for option in self.options)
        return self.chosen.action is Action.KEEP and not self.needs_instances and not could_drop


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorHistory:
    """What is remembered from look to look: a value of each planner."""

    load: LoadHistory = field(default_factory=LoadHistory)
    demand: DemandHistory = field(default_factory=DemandHistory)
    restore: RestoreHistory = field(default_factory=RestoreHistory)
    judge: JudgeHistory = field(default_factory=JudgeHistory, compare=False)


AT_REST = Decision(chosen=Option(action=Action.KEEP, why="nothing is due"))


def select(
    snapshot: ClusterSnapshot,
    merge: MergeConfig,
    drop: DropConfig,
    history: SelectorHistory,
    strategy: SwitchStrategy = SwitchStrategy.CARRY,
    judge_config: JudgeConfig = JUDGE,
) -> tuple[SwitchPlan | None, SelectorHistory, Decision]:
    """The next switch or None, what to remember for the next call, and why.

    A function of its arguments alone; it must see the cluster regularly, as the planners under it must. `strategy` is
    that of a pinned layout.
    """
    if not snapshot.policy.is_auto:
        return _towards_target(snapshot, drop, history, strategy)
    instances = ready_instances(snapshot.instances)
    judged = history.judge.seen(snapshot, instances, judge_config)
    history = replace(history, judge=judged)
    if judged.knows(instances):
        return _judged(snapshot, instances, merge, drop, judge_config, history)
    return _by_rules(snapshot, merge, drop, history)


def _judged(
    snapshot: ClusterSnapshot,
    instances: ReadyInstances,
    merge: MergeConfig,
    drop: DropConfig,
    config: JudgeConfig,
    history: SelectorHistory,
) -> tuple[SwitchPlan | None, SelectorHistory, Decision]:
    """What requests need comes first; of all else, the change that pays best."""
    plan, history, decision = _best(snapshot, instances, merge, drop, config, history)
    return plan, history, replace(decision, outcomes=history.judge.outcomes)


def _best(
    snapshot: ClusterSnapshot,
    instances: ReadyInstances,
    merge: MergeConfig,
    drop: DropConfig,
    config: JudgeConfig,
    history: SelectorHistory,
) -> tuple[SwitchPlan | None, SelectorHistory, Decision]:
    proposal = propose(snapshot, merge, history.load, is_judged=True)
    demand, demand_history = predict_demand(snapshot, drop, history.demand)
    history = replace(history, load=proposal.history, demand=demand_history)
    is_tp_busy = any(plan.group.kind is GroupKind.TP for plan in snapshot.switching)
    if proposal.plan is not None or is_backing_off(snapshot):
        if proposal.plan is None or is_tp_busy:
            return None, history, AT_REST
        return proposal.plan, replace(history, load=proposal.followed), _decide_alone(snapshot, drop, proposal.plan)
    needed = proposal.claimed - snapshot.busy  # for requests
    goals = [goal for goal in history.judge.forecasts.goals() if needed.isdisjoint(goal.members)]
    for goal in goals if proposal.look is not None else ():
        step = next_step(proposal.look.view, goal, proposal.look.may_split)
        if step is not None and snapshot.busy.isdisjoint(step[0].members):
            is_tp = step[0].kind is GroupKind.TP
            how = SwitchStrategy(merge.load_strategy) if is_tp else SwitchStrategy.CARRY
            why = f"on the way to {goal}"
            plan = make_plan(snapshot, instances, *step, how, why)
            return plan, history, _decide_alone(snapshot, drop, plan)
    claimed = proposal.claimed | snapshot.busy | {member for goal in goals for member in goal.members}
    changes, verdict = list[Change](), Verdict()
    if proposal.look is not None:
        look = proposal.look
        changes += tp_changes(look.view, merge, claimed, look.may_split, look.tp_groups())
    if drop.max_stages > 1 and drop.is_auto:
        verdict = plan_drop(snapshot, demand, drop, claimed=claimed)
        changes += drop_changes(demand, verdict)
        if proposal.look is not None:
            planned = {change.group for change in changes}
            changes += pp_changes(proposal.look.view, drop, claimed, proposal.look.may_split, planned)
    longest = max((d.longest_waiting_tokens for d in snapshot.demands), default=0)
    changes += restore_changes(demand, drop, snapshot.groups, claimed, longest)
    found = judge(snapshot, instances, changes, config, drop, history.judge)
    history = replace(history, judge=found.history)
    options = (_keep(found), *(_option(priced) for priced in found.priced))
    decision = Decision(
        chosen=options[0], options=options, needs_instances=verdict.needs_instances, is_judged=bool(found.priced)
    )
    if found.best is None:
        return None, history, decision
    change = found.best.change
    chosen = options[1 + found.priced.index(found.best)]
    how = SwitchStrategy(merge.load_strategy) if change.group.kind is GroupKind.TP else SwitchStrategy.CARRY
    plan = make_plan(snapshot, instances, change.group, change.is_merge, how, chosen.why, change.parts)
    return plan, history, replace(decision, chosen=chosen)


def _keep(found: Judgement) -> Option:
    why = "nothing else pays" if found.priced else AT_REST.chosen.why
    return Option(action=Action.KEEP, why=why, prediction=found.keep)


def _option(priced: Priced) -> Option:
    change = priced.change
    return Option(
        action=Action(change.verb),
        group=change.group,
        price_s=priced.price_s,
        gain_s=priced.gain_s,
        prediction=priced.then,
        why=priced.why,
    )


def _by_rules(
    snapshot: ClusterSnapshot, merge: MergeConfig, drop: DropConfig, history: SelectorHistory
) -> tuple[SwitchPlan | None, SelectorHistory, Decision]:
    """The first that is due, by the order above, while nothing can be predicted."""
    busy = snapshot.busy
    if any(plan.group.kind is GroupKind.TP for plan in snapshot.switching):
        proposal = Proposal(claimed=busy, history=history.load, followed=history.load)
    else:
        proposal = propose(snapshot, merge, history.load)
    if drop.max_stages <= 1 and not group_table(snapshot.layout.groups).of_kind[GroupKind.PP]:
        return (
            proposal.plan,
            SelectorHistory(load=proposal.followed, judge=history.judge),
            _decide_alone(snapshot, drop, proposal.plan),
        )
    demand, demand_history = predict_demand(snapshot, drop, history.demand)
    verdict = plan_drop(snapshot, demand, drop, claimed=proposal.claimed) if drop.is_auto else Verdict()
    if busy:  # what they lead to is not known yet
        verdict = replace(verdict, short=tuple(group for group in verdict.short if busy.isdisjoint(group.members)))
    restore, restore_history = plan_restore(snapshot, demand, drop, history.restore, claimed=proposal.claimed)
    plan = None if is_backing_off(snapshot) else _first(snapshot, demand, proposal, verdict, restore)
    is_followed = plan is not None and plan is proposal.plan
    history = SelectorHistory(
        load=proposal.followed if is_followed else proposal.history,
        demand=demand_history,
        restore=restore_history,
        judge=history.judge,
    )
    prices = Prices.of(demand, drop)
    return plan, history, _decide(_options(prices, proposal.plan, verdict, restore), plan, verdict)


def _towards_target(
    snapshot: ClusterSnapshot, drop: DropConfig, history: SelectorHistory, strategy: SwitchStrategy
) -> tuple[SwitchPlan | None, SelectorHistory, Decision]:
    target = snapshot.policy.target
    plan = plan_pinned(snapshot, target, strategy, "asked for") if target else None
    return plan, history, _decide_alone(snapshot, drop, plan)


def _decide_alone(snapshot: ClusterSnapshot, drop: DropConfig, plan: SwitchPlan | None) -> Decision:
    """The decision where there was one option at most."""
    if plan is None:
        return AT_REST
    prices = Prices(config=drop, by_member=demands_over(snapshot, plan.group))
    return _decide(_options(prices, plan), plan)


def _first(
    snapshot: ClusterSnapshot,
    demand: MemoryDemand,
    proposal: Proposal,
    verdict: Verdict,
    restore: RestorePlan | None,
) -> SwitchPlan | None:
    """The first that is due."""
    if proposal.plan is not None and proposal.reason is not Reason.LOAD:
        return proposal.plan
    carry = SwitchStrategy.CARRY
    if verdict.plan is not None:
        pipeline = verdict.plan.pipelines[0]
        return make_plan(snapshot, demand.instances, pipeline.group, True, carry, pipeline.why)
    if proposal.plan is not None and not (proposal.plan.is_merge and _is_short(demand, proposal.plan.group)):
        return proposal.plan
    if restore is not None:
        return make_plan(snapshot, demand.instances, restore.group, False, carry, restore.why, restore.parts)
    return None


def _is_short(demand: MemoryDemand, group: Group) -> bool:
    """Whether memory is short in a group that has any of the members of `group`."""
    table = demand.by_member.table
    position_of, at = table.position_of, demand.overloaded_at
    return bool(np.isin([position_of[member] for member in group.members if member in position_of], at).any())


def _decide(options: tuple[Option, ...], plan: SwitchPlan | None, verdict: Verdict | None = None) -> Decision:
    chosen = options[0]
    if plan is not None:
        chosen = next(o for o in options if (o.action.value, o.group) == (plan.verb, plan.group))
    return Decision(chosen=chosen, options=options, needs_instances=verdict is not None and verdict.needs_instances)


def _options(
    prices: Prices, proposed: SwitchPlan | None, verdict: Verdict | None = None, restore: RestorePlan | None = None
) -> tuple[Option, ...]:
    """All that was considered, with prices; to do nothing comes first."""
    why = verdict.why if verdict is not None and verdict.short else AT_REST.chosen.why
    options = [Option(action=Action.KEEP, price_s=prices.keep_s, why=why)]
    if proposed is not None:
        price_s = prices.switch_s(proposed.group)
        options.append(Option(action=Action(proposed.verb), group=proposed.group, price_s=price_s, why=proposed.why))
    if verdict is not None and verdict.plan is not None:
        options += [
            Option(action=Action.DROP, group=pipeline.group, price_s=prices.drop_s(pipeline), why=pipeline.why)
            for pipeline in verdict.plan.pipelines[:SHOWN_DROPS]
        ]
    if restore is not None:
        price_s = prices.switch_s(restore.group)
        options.append(Option(action=Action.RESTORE, group=restore.group, price_s=price_s, why=restore.why))
    return tuple(options)
