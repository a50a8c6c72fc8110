"""What a switch sends back to ingresses is load until it comes again, or its clients have left."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pengserve.planners.columns import ready_instances
from pengserve.planners.judge.away import LOST_S, Away
from pengserve.planners.judge.group_state import GroupStates
from pengserve.planners.selector import SelectorHistory, select
from pengserve.planners.types.config import DropConfig, MergeConfig
from pengserve.planners.types.layout import Group
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceStats
from tests.planners.judge.watching import served

IDS = np.arange(4)
WIDE = Group.parse("pp4@(0..3)")


def look(away: Away, back: list[int], again: list[int], now_s: float = 1.0) -> Away:
    return away.seen(IDS, np.array(back), np.array(again), now_s)


def test_what_has_left_and_not_come_is_away_and_belongs_where_it_left() -> None:
    away = look(Away(), [0, 6, 2, 0], [0, 0, 0, 0])
    assert (away.count, away.of((1,)), away.of((0, 1)), away.of((2, 3)), away.of((0,))) == (8, 6, 6, 2, 0)
    away = look(away, [0, 0, 0, 0], [4, 0, 0, 0], 1.1)
    assert (away.count, away.of((0, 1))) == (4, 3)
    away = look(away, [2, 0, 0, 0], [2, 0, 0, 0], 1.2)
    assert away.count == 4 and away.of(range(4)) == 4


def test_all_that_came_again_is_away_no_more_also_where_more_came_than_left() -> None:
    away = look(look(Away(), [3, 0, 0, 0], [0, 0, 0, 0]), [0, 0, 0, 0], [0, 5, 0, 0])
    assert away.count == 0 == away.of(range(4))
    assert look(away, [0, 0, 1, 0], [0, 0, 0, 0]).of((0,)) == 0, "what left before is forgotten"


def test_what_has_not_come_for_long_will_not_come() -> None:
    away = look(Away(), [3, 0, 0, 0], [0, 0, 0, 0], 1.0)
    assert look(away, [0] * 4, [0] * 4, 1.0 + LOST_S).count == 3
    assert look(away, [0] * 4, [0] * 4, 1.1 + LOST_S).count == 0


def with_stats(seen: ClusterSnapshot, stats: list[InstanceStats]) -> ClusterSnapshot:
    return replace(seen, instances=tuple(replace(i, stats=s) for i, s in zip(seen.instances, stats, strict=True)))


def after_a_drop(num_running: int, num_waiting: int) -> Iterator[ClusterSnapshot]:
    """Two full pipelines have become one: KV of what ran is on its way, and what waited is between two instances.

    All that ran and waited was theirs; nothing new comes after the drop.
    """
    *before, last = served(4, "pp2@(0,1) pp2@(2,3)", rate=4.0, running=num_running, waiting=num_waiting, seconds=20)
    yield from before
    wide = next(iter(served(4, str(WIDE), rate=0.0, running=0, seconds=1)))
    for tick in range(4):
        stats = []
        for old, new in zip(last.instances, wide.instances, strict=True):
            totals = {n: getattr(old.stats, n) for n in vars(old.stats) if n.startswith("total_")}
            num_back = 0 if old.stats.is_follower else old.stats.num_waiting
            stats.append(replace(new.stats, **totals | {"total_sent_back": num_back}))
        both = [i.stats for i in last.instances if not i.stats.is_follower]
        count, blocks = sum(s.num_running for s in both), sum(s.kv_blocks_used for s in both)
        stats[0] = replace(stats[0], num_waiting=count, num_holding=count, kv_blocks_used=blocks)
        yield replace(with_stats(wide, stats), time_s=last.time_s + 0.1 * (tick + 1))


def test_what_a_drop_moves_is_the_load_of_its_pipeline_from_the_first_look_on() -> None:
    history, loads = SelectorHistory(), list[tuple[float, float]]()
    for seen in after_a_drop(8, 20):
        _, history, _ = select(seen, MergeConfig(is_auto=False), DropConfig(is_auto=False), history)
        watched = history.judge.watched
        if watched.is_known:
            states = GroupStates(seen, ready_instances(seen.instances), watched.traffic())
            whole = [states.now(group) for group in seen.layout.groups]
            loads.append((watched.running, sum(state.waiting for state in whole)))
    state = GroupStates(seen, ready_instances(seen.instances), history.judge.watched.traffic()).now(WIDE)
    assert (state.running, state.waiting) == (32, 80)
    assert state.waiting_tokens == pytest.approx(80 * 1000)
    assert set(loads[-5:]) == {(32, 80)}
