"""Requests move between instances where that pays."""

from dataclasses import replace

import pytest

from pengserve.planners.decision import Action
from pengserve.planners.judge.moves import JudgedMoves, judge_moves
from pengserve.planners.selector import SelectorHistory, select
from pengserve.planners.types.config import DropConfig, JudgeConfig, MergeConfig
from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.snapshot import ClusterSnapshot
from tests.planners.judge.watching import served

MERGE, DROP = MergeConfig(max_degree=1), DropConfig()


def uneven(used: float, free: float, waiting: int = 0) -> tuple[ClusterSnapshot, SelectorHistory]:
    """Two instances that hold these shares of their KV, 256 blocks, and have been watched for a while.

    So many requests wait at the first one.
    """
    history, seen = SelectorHistory(), None
    for look in served(2, rate=0.3, prompt=1000, output=400, running=6, blocks=256, seconds=10):
        stats = [
            replace(i.stats, kv_blocks_used=int(share * 256), num_running=int(share * 7))
            for i, share in zip(look.instances, (used, free), strict=True)
        ]
        stats[0] = replace(stats[0], num_waiting=waiting, queued_tokens=1000 * waiting)
        seen = replace(look, instances=tuple(replace(i, stats=s) for i, s in zip(look.instances, stats, strict=True)))
        _, history, _ = select(seen, MERGE, DROP, history)
    assert seen is not None
    return seen, history


def order(seen: ClusterSnapshot, share: float) -> Migrate:
    source, target = (i.key for i in seen.instances)
    return Migrate(order_id="x", source=source, target=target, max_tokens=int(share * 256 * 32))


def test_requests_leave_a_full_instance_where_others_wait() -> None:
    seen, history = uneven(0.98, 0.1, waiting=3)
    found = judge_moves([order(seen, 0.4)], seen, JudgeConfig(), DROP, history.judge)
    assert found.orders and found.forecast is not None and found.decision is not None
    chosen, keep = found.decision.chosen, found.decision.options[0]
    assert chosen.action is Action.MIGRATE and (str(chosen.group), str(chosen.target)) == ("dp@(0)", "dp@(1)")
    assert chosen.gain_s > 0 < chosen.price_s
    assert chosen.prediction is not None and keep.prediction is not None
    assert chosen.prediction.ttft_s < keep.prediction.ttft_s


def test_nothing_moves_where_all_have_room() -> None:
    seen, history = uneven(0.45, 0.3)
    found = judge_moves([order(seen, 0.1)], seen, JudgeConfig(), DROP, history.judge)
    assert not found.orders and found.decision is not None and found.decision.chosen.action is Action.KEEP


@pytest.mark.parametrize("config", [JudgeConfig(is_on=False), JudgeConfig()])
def test_where_nothing_can_be_predicted_what_was_proposed_stands(config: JudgeConfig) -> None:
    seen, history = uneven(0.45, 0.3)
    orders = [order(seen, 0.1)]
    known = history.judge if not config.is_on else SelectorHistory().judge
    assert judge_moves(orders, seen, config, DROP, known) == JudgedMoves(orders=tuple(orders))
