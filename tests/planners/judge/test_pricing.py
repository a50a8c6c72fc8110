"""What a price takes into account: whether a pipeline is for memory, and requests whose KV is on its way."""

from dataclasses import replace

from pengserve.planners.columns import ready_instances
from pengserve.planners.judge.changes import Change
from pengserve.planners.judge.group_state import GroupStates
from pengserve.planners.judge.judge import JudgeHistory, pricing_of
from pengserve.planners.types.config import DropConfig, JudgeConfig
from pengserve.planners.types.layout import Group
from tests.planners.judge.watching import BLOCKS, served

PIPELINE, WIDE = Group.parse("pp2@(0,1)"), Group.parse("tp2@(0,1)")
ROOM = 160  # blocks that each instance uses, at most: memory is never short now


def gained_s(goal: Group, blocks: int) -> float:
    """Request-seconds that two instances gain as `goal`, for which prompts take more than half of the time."""
    history = JudgeHistory()
    for seen in served(2, rate=5.0, output=500, running=4, blocks=blocks):
        instances = ready_instances(seen.instances)
        history = history.seen(seen, instances, JudgeConfig())
    assert all(instance.stats.kv_blocks_used < ROOM for instance in seen.instances)
    pricing = pricing_of(seen, instances, JudgeConfig(), DropConfig(max_stages=2), history)
    change = Change("merge", goal, (), seen.layout.groups, (goal,), is_spare=True)
    (priced,) = pricing.price([change])
    return priced.gain_s


def test_a_pipeline_is_for_memory_once_memory_will_run_out() -> None:
    """Prompts may take most of its time then, which they may not where it only makes use of spare compute."""
    assert gained_s(PIPELINE, blocks=3 * ROOM) > 0
    assert gained_s(PIPELINE, blocks=BLOCKS) <= 0


def test_a_tensor_parallel_group_is_never_for_memory() -> None:
    assert gained_s(WIDE, blocks=3 * ROOM) <= 0


def test_requests_that_hold_kv_run_and_those_that_are_parked_wait() -> None:
    """Two run, three have their KV on its way after a drop, one is parked, and four hold none."""
    *_, seen = served(2, "pp2@(0,1)", rate=2.0, running=2)
    history = JudgeHistory()
    for look in served(2, "pp2@(0,1)", rate=2.0, running=2):
        history = history.seen(look, ready_instances(look.instances), JudgeConfig())
    leader, follower = seen.instances
    stats = replace(leader.stats, num_running=2, num_waiting=8, num_holding=3, num_parked=1)
    instances = ready_instances((replace(leader, stats=stats), follower))
    state = GroupStates(seen, instances, history.watched.traffic()).now(PIPELINE)
    assert (state.running, state.waiting) == (5, 5)
