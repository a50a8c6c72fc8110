"""Law: from_data inverts to_data, through real JSON."""

import json

import pytest

from pengserve.planners.types.codec import from_data, to_data
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.layout import Group, GroupKind, Layout
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import (
    ClusterSnapshot,
    InstanceSnapshot,
    InstanceState,
    InstanceStats,
    KvCapacity,
    LaneInfo,
)

DROP = SwitchPlan(
    plan_id="4:drop:pp2@(0,1)",
    epoch=Epoch(4),
    group=Group(kind=GroupKind.PP, members=(InstanceId(0), InstanceId(1))),
    members=(
        InstanceKey(instance_id=InstanceId(0), incarnation=0),
        InstanceKey(instance_id=InstanceId(1), incarnation=3),
    ),
    is_merge=True,
)


def make_snapshot() -> ClusterSnapshot:
    capacity = KvCapacity(
        num_blocks=10, block_size=32, bytes_per_block=4096, max_model_len=256, max_num_seqs=8, weight_bytes=1 << 20
    )
    instance = InstanceSnapshot(
        key=InstanceKey(instance_id=InstanceId(1), incarnation=3),
        state=InstanceState.READY,
        endpoint="127.0.0.1:1",
        capacity=capacity,
        stats=InstanceStats(step=7, last_step_s=0.25),
        lanes=(LaneInfo(shape="tp2", capacity=None, why_not="quantised"),),
    )
    starting = InstanceSnapshot(key=InstanceKey(instance_id=InstanceId(0), incarnation=0), state=InstanceState.STARTING)
    return ClusterSnapshot(
        app="a",
        time_s=1.5,
        layout=Layout.all_dp((InstanceId(1), InstanceId(0)), Epoch(4)),
        instances=(starting, instance),
        switching=(DROP,),
    )


def test_round_trip_through_json_is_identity() -> None:
    snapshot = make_snapshot()
    assert from_data(ClusterSnapshot, json.loads(json.dumps(to_data(snapshot)))) == snapshot


def test_missing_field_is_named() -> None:
    data = to_data(make_snapshot())
    del data["instances"][1]["key"]["incarnation"]
    with pytest.raises(ValueError, match=r"ClusterSnapshot\.instances\[1\]\.key\.incarnation is missing"):
        from_data(ClusterSnapshot, data)


def test_unknown_field_is_left_out() -> None:
    data = to_data(make_snapshot()) | {"of_tomorrow": 1}
    assert from_data(ClusterSnapshot, data) == make_snapshot()
