"""The next switch where what each would gain can be predicted: what requests need first, then what pays best."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pengserve.planners.columns import ReadyInstances
from pengserve.planners.decision import AT_REST, Action, Decision, Option
from pengserve.planners.drop import Verdict, plan_drop
from pengserve.planners.judge.changes import Change, drop_changes, pp_changes, restore_changes, tp_changes
from pengserve.planners.judge.judge import JudgeHistory, Judgement, judge
from pengserve.planners.judge.prediction import Priced
from pengserve.planners.judge.urgency import Urgency
from pengserve.planners.merge.history import LoadHistory
from pengserve.planners.merge.propose import Proposal, propose
from pengserve.planners.overload import DemandHistory, MemoryDemand, predict_demand
from pengserve.planners.redirect import relieved
from pengserve.planners.steps import make_plan, next_step
from pengserve.planners.types.config import DropConfig, JudgeConfig, MergeConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot
from pengserve.planners.types.strategy import SwitchStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Configs:
    """What people have set."""

    merge: MergeConfig
    drop: DropConfig
    judge: JudgeConfig
    redirects: bool = False  # what waits without KV is sent on to where it can begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is remembered from look to look."""

    load: LoadHistory
    demand: DemandHistory
    judge: JudgeHistory


Found = tuple[SwitchPlan | None, Memory, Decision]


def decide_by_gain(snapshot: ClusterSnapshot, instances: ReadyInstances, configs: Configs, memory: Memory) -> Found:
    """The next switch or None, what to remember, and why; with the outcomes of earlier decisions."""
    plan, memory, decision = _decide(snapshot, instances, configs, memory)
    memory = replace(memory, judge=memory.judge.settled())
    return plan, memory, replace(decision, outcomes=memory.judge.outcomes)


def _decide(snapshot: ClusterSnapshot, instances: ReadyInstances, configs: Configs, memory: Memory) -> Found:
    urgency = Urgency(snapshot, instances, configs.judge, configs.drop, memory.judge)
    proposal = propose(snapshot, configs.merge, memory.load, is_judged=True, urgency=urgency)
    demand, demand_history = predict_demand(snapshot, configs.drop, memory.demand)
    memory = replace(memory, load=proposal.history, demand=demand_history)
    if proposal.plan is not None:  # wishes come one after another, as each changes what the next should be
        if any(plan.group.kind is GroupKind.TP for plan in snapshot.switching):
            return None, memory, AT_REST
        return proposal.plan, replace(memory, load=proposal.followed), _alone(proposal.plan)
    goals = _goals(snapshot, proposal, memory.judge)
    plan = _towards(snapshot, instances, configs, proposal, goals)
    if plan is not None:
        return plan, memory, _alone(plan)
    if not memory.judge.knows(instances):
        return None, memory, AT_REST
    claimed = proposal.claimed | snapshot.busy | {member for goal in goals for member in goal.members}
    verdict = Verdict()
    if configs.drop.max_stages > 1 and configs.drop.is_auto:
        verdict = plan_drop(snapshot, demand, configs.drop, claimed=claimed)
        # What switches under way lead to is not known yet.
        short = tuple(group for group in verdict.short if snapshot.busy.isdisjoint(group.members))
        verdict = replace(verdict, short=short)
    changes = tuple(_changes(snapshot, configs, proposal, demand, verdict, claimed))
    found = judge(snapshot, instances, changes, configs.judge, configs.drop, memory.judge, claimed)
    memory = replace(memory, judge=found.history)
    return _followed(snapshot, instances, configs, memory, found, verdict)


def _changes(
    snapshot: ClusterSnapshot,
    configs: Configs,
    proposal: Proposal,
    demand: MemoryDemand,
    verdict: Verdict,
    claimed: frozenset[InstanceId],
) -> Iterator[Change]:
    """All that could be done now."""
    look, planned = proposal.look, set[Group]()
    sent_on = relieved(snapshot) if configs.redirects and verdict.plan is not None else frozenset[InstanceId]()
    for change in drop_changes(demand, verdict):
        planned.add(change.group)
        if sent_on.isdisjoint(change.group.members):
            yield change
    if look is not None:
        yield from tp_changes(look.view, configs.merge, claimed, look.may_split, look.tp_groups())
        if configs.drop.max_stages > 1 and configs.drop.is_auto:
            yield from pp_changes(look.view, configs.drop, claimed, look.may_split, planned)
    longest = max((d.longest_waiting_tokens for d in snapshot.demands), default=0)
    yield from restore_changes(demand, configs.drop, configs.merge, snapshot.groups, claimed, longest)


def _goals(snapshot: ClusterSnapshot, proposal: Proposal, judged: JudgeHistory) -> list[Group]:
    """Groups that an earlier change has begun to lead to, unless requests need their members now."""
    needed = proposal.claimed - snapshot.busy
    return [goal for goal in judged.forecasts.goals() if needed.isdisjoint(goal.members)]


def _towards(
    snapshot: ClusterSnapshot,
    instances: ReadyInstances,
    configs: Configs,
    proposal: Proposal,
    goals: Iterable[Group],
) -> SwitchPlan | None:
    """The next switch on the way to one of `goals`; None while each must wait."""
    look = proposal.look
    for goal in goals if look is not None else ():
        assert look is not None
        step = next_step(look.view, goal, look.may_split)
        if step is not None and snapshot.busy.isdisjoint(step[0].members):
            how = _how(step[0], configs)
            return make_plan(snapshot, instances, *step, how, f"on the way to {goal}")
    return None


def next_of_same_look(
    snapshot: ClusterSnapshot, configs: Configs, judged: JudgeHistory
) -> tuple[SwitchPlan | None, JudgeHistory, Decision]:
    """A controller asks again after each switch that it begins: the best of what was ranked and is still free."""
    judged, best = judged.next_of(snapshot.busy)
    if best is None:
        return None, judged, AT_REST
    option, members = _option(best), frozenset(best.change.group.members)
    instances = {i.key.instance_id: i for i in snapshot.instances if i.key.instance_id in members}
    return (
        _plan_of(snapshot, instances, configs, best),
        judged,
        Decision(chosen=option, options=(option,), is_judged=True),
    )


def _followed(
    snapshot: ClusterSnapshot,
    instances: ReadyInstances,
    configs: Configs,
    memory: Memory,
    found: Judgement,
    verdict: Verdict,
) -> Found:
    why = "nothing else pays" if found.priced else AT_REST.chosen.why
    keep = Option(action=Action.KEEP, why=why, prediction=found.keep)
    options = (keep, *map(_option, found.priced))
    decision = Decision(
        chosen=keep,
        options=options,
        needs_instances=verdict.needs_instances,
        is_short=verdict.plan is not None,
        is_judged=bool(found.priced),
    )
    if found.best is None:
        return None, memory, decision
    plan = _plan_of(snapshot, instances, configs, found.best)
    return plan, memory, replace(decision, chosen=options[1 + found.priced.index(found.best)])


def _plan_of(
    snapshot: ClusterSnapshot, instances: Mapping[InstanceId, InstanceSnapshot], configs: Configs, priced: Priced
) -> SwitchPlan:
    change = priced.change
    how = _how(change.group, configs)
    return make_plan(snapshot, instances, change.group, change.is_merge, how, priced.why, change.parts)


def _how(group: Group, configs: Configs) -> SwitchStrategy:
    """Drops and restores always carry."""
    return SwitchStrategy(configs.merge.load_strategy) if group.kind is GroupKind.TP else SwitchStrategy.CARRY


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


def _alone(plan: SwitchPlan) -> Decision:
    """The decision where nothing was compared."""
    chosen = Option(action=Action(plan.verb), group=plan.group, why=plan.why)
    return Decision(chosen=chosen, options=(Option(action=Action.KEEP, why=AT_REST.chosen.why), chosen))
