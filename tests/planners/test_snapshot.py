"""What instances tell of their load."""

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.placements import PlacementNote
from pengserve.planners.types.snapshot import (
    DeviceInfo,
    InstanceSnapshot,
    InstanceState,
    InstanceStats,
    KvCapacity,
    LaneInfo,
)
from pengserve.planners.types.step_cost import NOMINAL

CAPACITY = KvCapacity(
    num_blocks=64, block_size=16, bytes_per_block=1 << 20, max_model_len=512, max_num_seqs=8, weight_bytes=1 << 30
)
LANES = (
    LaneInfo(shape="dp", capacity=CAPACITY, step_cost=NOMINAL),
    LaneInfo(shape="tp2", capacity=None, why_not="it has 3 heads, and 2 instances cannot share them"),
)


def test_stats_of_named_values_are_those_of_the_constructor():
    values = {"step": 3, "num_running": 2, "shape": "tp2", "last_step_s": 0.5}
    found = InstanceStats.of(values)
    assert found == InstanceStats(**values)
    assert replace(found, step=0, num_running=0, shape="dp", last_step_s=0.0) == InstanceStats()
    assert pickle.loads(pickle.dumps(found)) == found
    assert InstanceStats.of({}) == InstanceStats(), "what was given before is not kept"


def test_stats_have_no_other_fields():
    with pytest.raises(TypeError, match="num_walking"):
        InstanceStats.of({"num_walking": 1})


def test_stats_do_not_change():
    with pytest.raises(FrozenInstanceError):
        InstanceStats.of({"step": 1}).step = 2


def _answer(instance_id: int) -> InstanceSnapshot:
    return InstanceSnapshot(
        key=InstanceKey(instance_id=InstanceId(instance_id), incarnation=3),
        state=InstanceState.READY,
        endpoint=f"127.0.0.1:{9000 + instance_id}",
        device=DeviceInfo(node_id="node", device=f"cuda:{instance_id}"),
        capacity=CAPACITY,
        stats=InstanceStats.of({"num_running": instance_id, "last_step_s": 0.5, "is_follower": True}),
        lanes=LANES,
        lane="tp2@(0,1)",
        epoch=Epoch(4),
        groups_ready=("tp2@(0,1)",),
        rss_bytes=1 << 40,
        revision=5,
        term=2,
        placements=(PlacementNote(number=1, reason="load", why="it fits", shape="dp", num_away=2, step_s=0.25),),
    )


def test_an_answer_is_the_same_off_a_wire():
    for sent in (_answer(1), InstanceSnapshot(key=_answer(1).key, state=InstanceState.STARTING)):
        found = pickle.loads(pickle.dumps(sent))
        assert found == sent and type(found.state) is InstanceState and type(found.stats.is_follower) is bool


def test_what_an_instance_says_again_is_the_object_that_is_here():
    first, again, other = (pickle.loads(pickle.dumps(_answer(i))) for i in (1, 1, 2))
    assert again.key is first.key and again.groups_ready is first.groups_ready
    assert again.lanes is first.lanes and other.lanes is first.lanes, "instances are alike"
    assert other.key != first.key and other.stats.num_running == 2


def test_another_lane_is_another_answer():
    sent = replace(_answer(1), lanes=(replace(LANES[0], step_tokens=4096), LANES[1]))
    assert pickle.loads(pickle.dumps(_answer(1))).lanes == LANES
    assert pickle.loads(pickle.dumps(sent)).lanes == sent.lanes != LANES
