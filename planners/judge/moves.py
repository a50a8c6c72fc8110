"""Whether requests should move between instances that stand: priced as changes of the layout are.

The thresholds of `planners.migrate` propose who gives and who takes. What both will make of their requests is predicted
with the move and without it; a move is ordered where it saves request-seconds beyond the margin.
"""

from collections.abc import Sequence

from pengserve.planners.columns import group_table, ready_instances
from pengserve.planners.judge.judge import JudgeHistory, pricing_of
from pengserve.planners.types.config import DropConfig, JudgeConfig
from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.snapshot import ClusterSnapshot


def paying(
    orders: Sequence[Migrate],
    snapshot: ClusterSnapshot,
    config: JudgeConfig,
    drop: DropConfig,
    history: JudgeHistory,
) -> tuple[Migrate, ...]:
    """Those of `orders` that pay; all of them where nothing can be predicted."""
    instances = ready_instances(snapshot.instances)
    is_known = history.watched.is_of_late(snapshot.time_s) and history.knows(instances)
    if not orders or not config.is_on or not is_known:
        return tuple(orders)
    group_of = group_table(snapshot.layout.groups).group_of
    pricing = pricing_of(snapshot, instances, config, drop, history)
    found = []
    for order in orders:
        source, target = (group_of.get(key.instance_id) for key in (order.source, order.target))
        if source is None or target is None:
            continue
        gain_s, keep_s = pricing.move(source, target, order.max_tokens)
        if gain_s > config.least(keep_s):
            found.append(order)
    return tuple(found)
