"""Answers of one life have one number as long as they differ in their loads alone."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

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
    face_of,
)
from pengserve.replicas.revisions import Revisions

ANSWER = InstanceSnapshot(key=InstanceKey(instance_id=InstanceId(0), incarnation=1), state=InstanceState.READY)
LOADS: dict[str, Any] = {"stats": InstanceStats(num_running=3), "rss_bytes": 7}
OTHERS: dict[str, Any] = {
    "state": InstanceState.DRAINING,
    "endpoint": "127.0.0.1:1",
    "device": DeviceInfo(pid=7),
    "capacity": KvCapacity(
        num_blocks=1, block_size=16, bytes_per_block=1, max_model_len=1, max_num_seqs=1, weight_bytes=1
    ),
    "lanes": (LaneInfo(shape="tp2", capacity=None),),
    "lane": "tp2@(0,1)",
    "epoch": Epoch(1),
    "peer_endpoint": "127.0.0.1:2",
    "groups_ready": ("tp2@(0,1)/0.1-1.1/0",),
    "groups_failed": ("tp2@(0,1)/0.1-1.1/0",),
    "phase": "loading the model",
    "failure": "it has failed",
    "placements": (PlacementNote(number=1, reason="the batch changed", why="no layer away", shape="dp", num_away=0),),
}


def test_each_field_is_a_load_or_calls_for_a_new_number() -> None:
    assert {f.name for f in fields(InstanceSnapshot)} == {"key", "revision", "term", *LOADS, *OTHERS}


def test_other_loads_keep_the_number() -> None:
    revisions = Revisions()
    first = revisions.numbered(ANSWER)
    assert first.revision == 1
    assert revisions.numbered(replace(ANSWER, **LOADS)) == replace(first, **LOADS)


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_else_differs_has_a_number_of_its_own(name: str) -> None:
    revisions = Revisions()
    revisions.numbered(ANSWER)
    assert revisions.numbered(replace(ANSWER, **{name: OTHERS[name]})).revision == 2
    assert revisions.numbered(ANSWER).revision == 3, "a number is never used again"


def test_answers_of_many_threads_with_one_number_are_alike() -> None:
    revisions = Revisions()
    answers = [replace(ANSWER, epoch=Epoch(i // 3)) for i in range(3000)]
    with ThreadPoolExecutor(8) as pool:
        numbered = list(pool.map(revisions.numbered, answers))
    faces = {}
    for answer in numbered:
        assert faces.setdefault(answer.revision, face_of(answer)) == face_of(answer)
