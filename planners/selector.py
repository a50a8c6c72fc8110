"""The one arbiter of the layout: which of merge, split, drop and restore comes next, so that plans never fight.

What requests need comes first: merges and splits for those that are too long, urgent, or ask for a shape; their groups
are theirs. Of all else the change comes next that pays best (`planners.judged`). Where a user has pinned a layout, the
next switch is one that leads to it.

While nothing can be predicted, since no request has come or no step was measured, the first that is due comes next:

    1. merge, split    for what requests need
    2. drop            where memory is short, or will be in a moment
    3. split, merge    for load; no group that is short of memory is merged for load
    4. restore         where memory is plenty, and short nowhere

These have prices too, for people: seconds that requests stall, over all requests (`planners.prices`).

Switches whose groups have no member in common are carried out side by side: a call plans what members of those under
way, and of those that were aborted a moment ago, have no part in. Merges and splits for wishes and long requests come
one after another all the same, as each changes what the next should be.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from pengserve.planners.columns import group_table, ready_instances
from pengserve.planners.decision import AT_REST as AT_REST
from pengserve.planners.decision import Action as Action
from pengserve.planners.decision import Decision as Decision
from pengserve.planners.decision import Option as Option
from pengserve.planners.drop import Verdict, plan_drop
from pengserve.planners.judge.judge import JudgeHistory
from pengserve.planners.judged import Configs, Memory, decide_by_gain, next_of_same_look
from pengserve.planners.merge.history import LoadHistory, Reason
from pengserve.planners.merge.propose import Proposal, propose
from pengserve.planners.overload import DemandHistory, MemoryDemand, predict_demand
from pengserve.planners.pinned import plan_pinned
from pengserve.planners.prices import Prices, demands_over
from pengserve.planners.restore import RestoreHistory, RestorePlan, plan_restore
from pengserve.planners.steps import make_plan
from pengserve.planners.types.config import DropConfig, JudgeConfig, MergeConfig
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import ClusterSnapshot
from pengserve.planners.types.strategy import SwitchStrategy

JUDGE = JudgeConfig()
SHOWN_DROPS = 4  # options of one look; a thousand instances may call for hundreds


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorHistory:
    """What is remembered from look to look: a value of each planner."""

    load: LoadHistory = field(default_factory=LoadHistory)
    demand: DemandHistory = field(default_factory=DemandHistory)
    restore: RestoreHistory = field(default_factory=RestoreHistory)
    judge: JudgeHistory = field(default_factory=JudgeHistory, compare=False)


def select(
    snapshot: ClusterSnapshot,
    merge: MergeConfig,
    drop: DropConfig,
    history: SelectorHistory,
    strategy: SwitchStrategy = SwitchStrategy.CARRY,
    judge_config: JudgeConfig = JUDGE,
    *,
    redirects: bool = False,
) -> tuple[SwitchPlan | None, SelectorHistory, Decision]:
    """The next switch or None, what to remember for the next call, and why.

    A function of its arguments alone; it must see the cluster regularly, as the planners under it must. `strategy` is
    that of a pinned layout. With `redirects` no drop is made for a queue that can begin elsewhere.
    """
    if not snapshot.policy.is_auto:
        # The judge watches all the same: it must know the load when the layout is released.
        watched = history.judge.seen(snapshot, ready_instances(snapshot.instances), judge_config).settled()
        return _towards_target(snapshot, drop, replace(history, judge=watched), strategy)
    configs = Configs(merge=merge, drop=drop, judge=judge_config, redirects=redirects)
    if history.judge.is_same_look(snapshot):
        plan, judged, decision = next_of_same_look(snapshot, configs, history.judge)
        return plan, replace(history, judge=judged), decision
    instances = ready_instances(snapshot.instances)
    judged = history.judge.seen(snapshot, instances, judge_config)
    history = replace(history, judge=judged)
    if judge_config.is_on and (judged.knows(instances) or judged.will_know(snapshot, instances)):
        memory = Memory(load=history.load, demand=history.demand, judge=judged)
        plan, memory, decision = decide_by_gain(snapshot, instances, configs, memory)
        history = replace(history, load=memory.load, demand=memory.demand, judge=memory.judge)
        return plan, history, decision
    return _by_rules(snapshot, merge, drop, replace(history, judge=judged.settled()))


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
    plan = _first(snapshot, demand, proposal, verdict, restore)
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
