"""Laws of hidden states that go from device to device, over a fake that keeps NCCL's rules; no GPU is needed."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.comm.communicator import Communicator
from pengserve.replicas.engine.groups.hidden import DeviceHidden, HiddenCodec
from pengserve.replicas.engine.groups.pp_lane import PpLane
from tests.replicas.comm.fake_nccl import nccl_is_there
from tests.replicas.comm.local import LocalCluster
from tests.replicas.engine.test_hidden import Stage

pytestmark = pytest.mark.slow  # imports vLLM

CODEC = HiddenCodec(Stage(), torch.device("cpu"))  # type: ignore[arg-type]
NAMES = ("hidden_states", "residual")


@pytest.fixture
def group() -> Iterator[list[Communicator]]:
    """A pipeline of two: rank 0 leads and has the last stage, rank 1 the first."""
    with nccl_is_there():
        cluster = LocalCluster(2, timeout_s=5.0, backend="nccl")
        yield cluster.group(0, 1)
        cluster.close()


def states(number: int, num_tokens: int) -> Any:
    tensors = {name: torch.full((num_tokens, 8), number + i / 2).bfloat16() for i, name in enumerate(NAMES)}
    return SimpleNamespace(tensors=tensors)


def head(num_tokens: int) -> bytes:
    """Of a message about states of so many tokens."""
    return bytes(CODEC.encode(states(0, num_tokens), num_tokens)[0])


def ways(group: list[Communicator]) -> tuple[DeviceHidden, DeviceHidden]:
    """Of the first stage and of the last."""
    first, last = (DeviceHidden(CODEC, group[rank], 1 - rank, 1 - rank) for rank in (1, 0))
    return first, last


def test_a_stage_goes_on_while_the_next_one_is_busy_and_may_overwrite_what_it_has_sent(
    group: list[Communicator],
) -> None:
    first, last = ways(group)
    output = states(0, 3)  # as of a captured graph: each result is where the last one was, and has a row too many
    messages = []
    begun_s = time.monotonic()
    for number in range(3):
        for name, tensor in states(number, 3).tensors.items():
            output.tensors[name].copy_(tensor)
        messages.append([bytes(part) for part in first.encode(output, 2)])
    assert time.monotonic() - begun_s < 2.0, "no send was waited for"
    for number, message in enumerate(messages):
        found = last.decode(message, 2).tensors
        assert all(torch.equal(found[name], states(number, 3).tensors[name]) for name in NAMES)
    assert sum(map(len, messages[0])) == 8, "the message itself carries no states"


def test_states_of_another_microbatch_are_refused(group: list[Communicator]) -> None:
    _, last = ways(group)
    with pytest.raises(EngineError, match="came for 4"):
        last.decode([head(3)], 4)


def test_a_stage_that_dies_between_message_and_states_frees_the_one_that_waits(group: list[Communicator]) -> None:
    """The reader's thread aborts."""
    first, last = ways(group)
    threading.Timer(0.2, group[0].abort).start()
    begun_s = time.monotonic()
    with pytest.raises(EngineError):
        last.decode([head(3)], 3)
    assert time.monotonic() - begun_s < 1.0
    group[1].abort()
    for call in (lambda: first.encode(states(1, 3), 3), first.require_whole):
        with pytest.raises(EngineError):
            call()


@pytest.mark.parametrize("stage", range(3))
def test_a_lane_goes_by_what_its_groups_communicator_can(stage: int) -> None:
    lane: Any = PpLane.__new__(PpLane)
    lane.stage, lane._codec_of_hidden = stage, CODEC
    lane.group = SimpleNamespace(world_size=3)
    by_message, by_device = (SimpleNamespace(communicator=SimpleNamespace(posts=posts)) for posts in (False, True))
    assert lane._way_of(by_message) is CODEC
    way = lane._way_of(by_device)
    assert isinstance(way, DeviceHidden)
    assert (way._before, way._after) == {0: (0, 2), 1: (1, 0), 2: (2, 1)}[stage], "ranks; the leader has the last stage"


def test_groups_over_tcp_post_nothing() -> None:
    cluster = LocalCluster(2, timeout_s=5.0)
    found = cluster.group(0, 1)[0]
    assert not found.posts
    with pytest.raises(NotImplementedError):
        found.post([])
    cluster.close()
