"""When to merge instances into tensor-parallel groups and when to split them (Flying Serving section 2.3).

Three reasons, the first first: a request that no route holds, requests that ask for a shape or are urgent, and load.
Each reason claims the groups it needs; the next one has what is left. A plan is one merge or one split. A merge takes
narrower groups as they are; where some cannot join, they are split first, and each call is judged anew.

What keeps the layout from flapping:

    reason        merges                                        splits
    long context  at once                                       when no such request runs or is on its way
    priority      at once, if `urgency` allows the group        `min_dwell_s` after the last such request
    load          low for `quiet_s`, and `min_dwell_s` after    above `split_above` after `min_dwell_s`;
                  the last split for load                       at once where requests queue

So a burst never waits for a dwell, and load changes the layout back and forth at most once in `min_dwell_s`.
"""

from dataclasses import dataclass, field, replace

from pengserve.planners.load import ClusterView
from pengserve.planners.merge.for_load import for_load, resume_paused
from pengserve.planners.merge.history import LoadHistory, Reason, observe, waiting_since
from pengserve.planners.merge.long_context import for_long_context
from pengserve.planners.merge.look import Look
from pengserve.planners.merge.wishes import for_wishes
from pengserve.planners.steps import make_plan
from pengserve.planners.types.config import MergeConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import ClusterSnapshot
from pengserve.planners.types.strategy import SwitchStrategy
from pengserve.planners.urgency import ANY_GROUP, Urgency

QUEUE_S = 0.3  # a queue that stands for so long is one; a shorter one is an arrival between two steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What the merge planner would do next, and which instances it counts on."""

    plan: SwitchPlan | None = None
    reason: Reason | None = None  # of the plan
    claimed: frozenset[InstanceId] = frozenset()  # for long and urgent requests: leave their groups alone
    history: LoadHistory = field(default_factory=LoadHistory)  # for the next call, where the plan is not followed
    followed: LoadHistory = field(default_factory=LoadHistory)  # ... and where it is
    look: Look | None = field(default=None, compare=False)  # what the judge of merges and splits for load asks


def propose(
    snapshot: ClusterSnapshot,
    config: MergeConfig,
    history: LoadHistory,
    *,
    is_judged: bool = False,
    urgency: Urgency = ANY_GROUP,
) -> Proposal:
    """The next merge or split, for a caller that may choose another switch.

    A function of its arguments alone. It must see the cluster regularly, also while nothing happens: the history
    measures how long things last. After a gap of more than `quiet_s` the measuring begins anew.

    Args:
        is_judged: merges and splits for load are the judge's: only what requests need is proposed.
        urgency: which groups urgent requests get.
    """
    if not snapshot.policy.is_auto:
        return Proposal(history=history, followed=history)
    if history.seen_s is not None and snapshot.time_s - history.seen_s > config.quiet_s:
        history = replace(history, low_since_s={}, queue_since_s={})  # nothing was measured during the gap
    queues = waiting_since(snapshot, history)
    lasting_queues = (i for i, since_s in queues.items() if snapshot.time_s - since_s >= QUEUE_S)
    view = ClusterView.of(snapshot, config.busy_requests, lasting_queues)
    history = observe(view, config, replace(history, queue_since_s=queues, seen_s=snapshot.time_s), is_judged)
    look = Look(view=view, config=config, history=history, claimed=snapshot.claims, urgency=urgency)
    step = for_long_context(look) or for_wishes(look)
    if step is None:
        step = resume_paused(look) if is_judged else for_load(look)
    history, claimed = look.history, frozenset(look.claimed)
    if step is None:
        return Proposal(claimed=claimed, history=history, followed=history, look=look)
    strategy, why = SwitchStrategy(step.strategy), f"{step.reason}: {step.why}"
    plan = make_plan(snapshot, view.instances, step.group, step.is_merge, strategy, why)
    followed = history
    if step.is_merge:
        followed = replace(history, planned=(step.group, step.reason))
    elif step.reason is Reason.LOAD and view.load(step.group).load > config.split_above:
        followed = replace(history, relieved_s=snapshot.time_s)
    return Proposal(plan=plan, reason=step.reason, claimed=claimed, history=history, followed=followed, look=look)
