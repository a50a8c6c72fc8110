"""The one arbiter of the layout: which of merge, split, drop and restore comes next, so that plans never fight.

The first that is due, and each one on what those before it leave alone:

    1. merge, split    for requests that are too long, urgent, or ask for a shape: their groups are theirs
    2. drop            where memory is short, or will be in a moment
    3. split, merge    for load; no group that is short of memory is merged for load
    4. restore         where memory is plenty, and short nowhere

Switches whose groups have no member in common are carried out side by side: a call plans what members of those under
way, and of those that were aborted a moment ago, have no part in. Merges and splits for load, wishes and long requests
come one after another all the same, as each changes what the next should be.

Where a user has pinned a layout, the rules above rest, and the next switch is one that leads to that layout.

Every option has a price, in seconds that requests stall, added up over all requests: those whose KV a switch moves, for
as long as that takes; and those that find no memory after it, for `min_dwell_s` each, as that is when the layout is
judged anew. The order above decides, and prices decide between options of one kind; they are there for people to see
what else was possible, and what it would have cost.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from pengserve.planners.columns import group_table
from pengserve.planners.drop import Verdict, plan_drop
from pengserve.planners.merge import LoadHistory, Proposal, Reason, propose
from pengserve.planners.overload import DemandHistory, MemoryDemand, predict_demand
from pengserve.planners.pinned import plan_pinned
from pengserve.planners.prices import Prices, demands_over
from pengserve.planners.restore import RestoreHistory, RestorePlan, plan_restore
from pengserve.planners.steps import make_plan
from pengserve.planners.types.config import DropConfig, MergeConfig
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.plans import SwitchPlan, SwitchStrategy
from pengserve.planners.types.snapshot import ClusterSnapshot

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
    why: str = ""  # one sentence for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is done, and what else was possible."""

    chosen: Option
    options: tuple[Option, ...] = ()  # all that were considered, the chosen one among them
    needs_instances: bool = False  # memory is short, and dropping parameters does not help, or not enough

    def is_same(self, other: "Decision") -> bool:
        """Whether both say to do the same. Prices differ from look to look."""
        mine = self.chosen.action, self.chosen.group, self.needs_instances
        return mine == (other.chosen.action, other.chosen.group, other.needs_instances)

    @property
    def is_rest(self) -> bool:
        """Whether nothing is to be done, and nothing is missing."""
        return self.chosen.action is Action.KEEP and not self.needs_instances


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorHistory:
    """What is remembered from look to look: a value of each planner."""

    load: LoadHistory = field(default_factory=LoadHistory)
    demand: DemandHistory = field(default_factory=DemandHistory)
    restore: RestoreHistory = field(default_factory=RestoreHistory)


AT_REST = Decision(chosen=Option(action=Action.KEEP, why="nothing is due"))


def select(
    snapshot: ClusterSnapshot,
    merge: MergeConfig,
    drop: DropConfig,
    history: SelectorHistory,
    strategy: SwitchStrategy = SwitchStrategy.CARRY,
) -> tuple[SwitchPlan | None, SelectorHistory, Decision]:
    """The next switch or None, what to remember for the next call, and why.

    A function of its arguments alone; it must see the cluster regularly, as the planners under it must. `strategy` is
    that of a pinned layout.
    """
    if not snapshot.policy.is_auto:
        return _towards_target(snapshot, drop, history, strategy)
    busy = snapshot.busy
    if any(plan.group.kind is GroupKind.TP for plan in snapshot.switching):
        proposal = Proposal(claimed=busy, history=history.load, followed=history.load)
    else:
        proposal = propose(snapshot, merge, history.load)
    if drop.max_stages <= 1 and not group_table(snapshot.layout.groups).of_kind[GroupKind.PP]:
        return proposal.plan, SelectorHistory(load=proposal.followed), _decide_alone(snapshot, drop, proposal.plan)
    demand, demand_history = predict_demand(snapshot, drop, history.demand)
    verdict = plan_drop(snapshot, demand, drop, claimed=proposal.claimed) if drop.is_auto else Verdict()
    if busy:  # what they lead to is not known yet
        verdict = replace(verdict, short=tuple(group for group in verdict.short if busy.isdisjoint(group.members)))
    restore, restore_history = plan_restore(snapshot, demand, drop, history.restore, claimed=proposal.claimed)
    plan = _first(snapshot, demand, proposal, verdict, restore)
    is_followed = plan is not None and plan is proposal.plan
    history = SelectorHistory(
        load=proposal.followed if is_followed else proposal.history, demand=demand_history, restore=restore_history
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
