"""NCCL groups as `replicas.comm` makes them, on one device: a group of one, and two members that NCCL refuses."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.replicas.comm.torch_group import TorchCommunicator, nccl_group
from tests.gpu.figures import note_figure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KEY = InstanceKey(instance_id=InstanceId(0), incarnation=0)


def alone(timeout_s: float = 20.0) -> TorchCommunicator:
    """A group of this process alone, connected when it is made."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    group = nccl_group(dist.HashStore(), 0, 1, device, timeout_s)
    return TorchCommunicator("alone", [KEY], 0, timeout_s, group)


def test_a_group_of_one_makes_every_call() -> None:
    began_s = time.perf_counter()
    group = alone()
    tensor = torch.arange(1024, dtype=torch.float32, device="cuda")
    expected = tensor.clone()
    assert torch.equal(group.all_reduce(tensor), expected)
    torch.cuda.synchronize()
    note_figure("an NCCL group of one, made and first used", 1e3 * (time.perf_counter() - began_s), "ms")
    assert torch.equal(group.all_gather(tensor), expected)
    gathered = group.gather(tensor)
    assert gathered is not None and torch.equal(gathered, expected)
    assert torch.equal(group.broadcast(tensor), expected)
    group.exchange([])
    group.barrier()
    group.require_whole()
    group.abort()


def test_a_group_that_was_aborted_makes_no_call() -> None:
    group = alone()
    group.all_reduce(torch.ones(8, device="cuda"))
    group.abort()
    assert group.is_broken
    with pytest.raises(EngineError, match="aborted"):
        group.all_reduce(torch.ones(8, device="cuda"))
    assert torch.ones(8, device="cuda").sum().item() == 8.0, "the device goes on"


def test_an_all_reduce_in_a_captured_graph_is_replayed() -> None:
    """What lanes with CUDA graphs rest on: a group outside of any world takes part in a capture."""
    group = alone()
    tensor = torch.ones(1024, device="cuda")
    group.all_reduce(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        doubled = group.all_reduce(tensor * 2)
    tensor.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert doubled.unique().tolist() == [6.0]
    del graph
    group.abort()


def test_timeouts_can_be_told() -> None:
    """The watchdog's variables and the options are those of this torch."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=1.0)
    options.config.blocking = 0
