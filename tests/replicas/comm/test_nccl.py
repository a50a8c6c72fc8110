"""The calls that torch's NCCL groups are given, over a fake that keeps NCCL's rules; no GPU is needed."""

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.comm.communicator import Communicator, Move
from tests.replicas.comm.fake_nccl import FakeNccl, RefusingNccl, SilentNccl, nccl_is_there
from tests.replicas.comm.local import LocalCluster
from tests.replicas.comm.member import check_collectives


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with nccl_is_there():
        made = LocalCluster(3, timeout_s=5.0, backend="nccl")
        yield made
        made.close()


def test_every_call_is_right_and_equal_on_all_members(cluster: LocalCluster) -> None:
    digests = cluster.on(cluster.group(0, 1, 2), check_collectives)
    assert not [digest for digest in digests if isinstance(digest, Exception)], digests
    assert len(set(map(str, digests))) == 1


def test_no_thread_of_torch_ends_the_process_of_a_member_whose_peer_has_died(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the operator says otherwise."""
    for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING"):
        monkeypatch.delenv(f"TORCH_NCCL_{name}", raising=False)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    cluster.group(0, 1)
    found = {name: os.environ.get(f"TORCH_NCCL_{name}") for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING")}
    assert found == {"ASYNC_ERROR_HANDLING": "2", "ENABLE_MONITORING": "0"}
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_an_exchange_is_coalesced_on_the_device_of_its_tensors(cluster: LocalCluster) -> None:
    def swap(group: Communicator) -> torch.Tensor:
        mine, other = torch.full((3,), float(group.rank)), torch.empty(3)
        group.exchange([Move(group.rank, 1 - group.rank, mine), Move(1 - group.rank, group.rank, other)])
        return other

    found = cluster.on(cluster.group(0, 1), swap)
    assert [tensor.tolist() for tensor in found] == [[1.0] * 3, [0.0] * 3]  # type: ignore[union-attr]


def test_a_call_whose_peer_never_comes_ends_when_another_thread_aborts(cluster: LocalCluster) -> None:
    group = cluster.group(0, 1)
    start_s = time.monotonic()
    threading.Timer(0.2, group[0].abort).start()
    (result,) = cluster.on(group[:1], lambda c: c.all_reduce(torch.ones(4)))
    assert isinstance(result, EngineError) and "aborted" in str(result), result
    assert time.monotonic() - start_s < 1.0
    assert group[0].is_broken


def test_what_an_aborted_group_computed_is_not_used(cluster: LocalCluster) -> None:
    group = cluster.group(0, 1)
    group[0].abort()
    with pytest.raises(EngineError):
        group[0].require_whole()
    group[1].require_whole()


def test_a_lost_member_frees_a_thread_that_waits_in_a_call(cluster: LocalCluster) -> None:
    """The reader's thread aborts: the one that waits cannot."""
    group = cluster.group(0, 1)
    pool = cluster.members[0].pool
    start_s = time.monotonic()
    threading.Timer(0.2, pool.mark_failed, [group[0].name]).start()
    (result,) = cluster.on(group[:1], lambda c: c.barrier())
    assert isinstance(result, EngineError)
    assert time.monotonic() - start_s < 1.0 and group[0].name in pool.failed()


@pytest.mark.parametrize("kind", [RefusingNccl, SilentNccl])
def test_a_group_whose_members_nccl_does_not_connect_is_never_ready(kind: type[FakeNccl]) -> None:
    """Seen on a GPU: two members on one device connect without an error, and no call of theirs can be made."""
    with nccl_is_there(kind):
        cluster = LocalCluster(2, timeout_s=0.5, backend="nccl")
        spec = cluster.spec(0, 1)
        start_s = time.monotonic()
        cluster.all(lambda member: member.pool.build([spec]))
        assert time.monotonic() - start_s < 5.0
        assert [member.pool.failed() for member in cluster.members] == [(spec.name,)] * 2
        assert [member.pool.ready() for member in cluster.members] == [()] * 2
        cluster.close()
