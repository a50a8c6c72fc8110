"""Laws of a group's calls: right and equal on all members; who is out of step, silent or aborted is an error."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.comm.communicator import Communicator, Move
from pengserve.replicas.comm.direct import DirectCommunicator
from pengserve.replicas.comm.staged import StagedCommunicator
from tests.replicas.comm.local import LocalCluster
from tests.replicas.comm.member import check_collectives
from tests.support.waiting import until


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    made = LocalCluster(4, timeout_s=2.0)
    yield made
    made.close()


@pytest.fixture(params=[2, 3, 4])
def group(cluster: LocalCluster, request: pytest.FixtureRequest) -> list[Communicator]:
    rounds = getattr(cluster, "rounds", 0)
    cluster.rounds = rounds + 1  # type: ignore[attr-defined]
    return cluster.group(*range(request.param), round_=rounds)


def test_every_call_is_right_and_equal_on_all_members(cluster: LocalCluster, group: list[Communicator]) -> None:
    digests = cluster.on(group, check_collectives)
    assert not [digest for digest in digests if isinstance(digest, Exception)]
    assert len(set(map(str, digests))) == 1


def test_by_way_of_the_host_every_call_is_right_too(cluster: LocalCluster, group: list[Communicator]) -> None:
    """Over tensors on the CPU, which are copied there and back all the same."""
    staged: list[Communicator] = [StagedCommunicator(member) for member in group]
    digests = cluster.on(staged, check_collectives)
    assert not [digest for digest in digests if isinstance(digest, Exception)], digests
    assert len(set(map(str, digests))) == 1
    staged[0].abort()
    assert staged[0].is_broken and group[0].is_broken


def test_an_all_reduce_sums_in_rank_order(cluster: LocalCluster, group: list[Communicator]) -> None:
    for num_values in (1000, 300_000):
        values = [torch.randn(num_values, generator=torch.Generator().manual_seed(r)) * 10**r for r in range(4)]
        in_order = values[0].clone()
        for value in values[1 : len(group)]:
            in_order += value
        for result in cluster.on(group, lambda c, v=values: c.all_reduce(v[c.rank].clone())):  # type: ignore[misc]
            assert isinstance(result, torch.Tensor) and torch.equal(result, in_order)


def test_members_out_of_step_raise_instead_of_mixing_data(cluster: LocalCluster, group: list[Communicator]) -> None:
    results = cluster.on(group, lambda c: c.all_reduce(torch.ones(4 if c.rank else 8)))
    assert all(isinstance(result, EngineError) for result in results), results
    results = cluster.on(group, lambda c: c.barrier())
    assert all(isinstance(result, EngineError) and group[0].name in str(result) for result in results), results


def test_a_different_call_of_the_same_size_is_out_of_step_too(cluster: LocalCluster) -> None:
    pair = cluster.group(0, 1, round_=900)
    results = cluster.on(pair, lambda c: c.all_reduce(torch.ones(4)) if c.rank else c.all_gather(torch.ones(4)))
    assert all(isinstance(result, EngineError) for result in results), results


def test_a_silent_member_is_given_up_after_the_time_out(cluster: LocalCluster, group: list[Communicator]) -> None:
    start_s = time.monotonic()
    results = cluster.on(group[:-1], lambda c: c.all_reduce(torch.ones(4)))
    assert all(isinstance(result, EngineError) for result in results), results
    assert 0.9 < time.monotonic() - start_s < 8.0


def test_an_abort_from_another_thread_ends_a_waiting_call_everywhere(
    cluster: LocalCluster, group: list[Communicator]
) -> None:
    start_s = time.monotonic()
    threading.Timer(0.1, group[0].abort).start()
    results = cluster.on(group[:-1], lambda c: c.barrier())
    assert all(isinstance(result, EngineError) for result in results), results
    assert time.monotonic() - start_s < 0.95  # the time-out is 1 s
    # The last finds all that the others had sent; its next call is lost.
    late = [cluster.on(group[-1:], lambda c: c.barrier())[0] for _ in range(2)]
    assert isinstance(late[-1], EngineError)
    assert all(c.is_broken for c in group)


def test_both_may_send_more_than_the_kernel_holds(cluster: LocalCluster) -> None:
    pair = cluster.group(0, 1, round_=901)

    def swap(c: Communicator) -> float:
        mine, theirs = torch.full((8 << 20,), float(c.rank)), torch.empty(8 << 20)
        c.exchange([Move(0, 1, mine if c.rank == 0 else theirs), Move(1, 0, mine if c.rank == 1 else theirs)])
        return float(theirs.sum())

    assert cluster.on(pair, swap) == [float(8 << 20), 0.0]


def test_a_second_thread_is_refused_and_breaks_nothing(cluster: LocalCluster) -> None:
    pair = cluster.group(0, 1, round_=902)
    waiting = threading.Thread(target=pair[0].barrier)
    waiting.start()
    until(pair[0]._using.locked)
    with pytest.raises(EngineError, match="one thread at a time"):
        pair[0].barrier()
    pair[1].barrier()
    waiting.join(5)
    assert not waiting.is_alive() and not pair[0].is_broken


def test_a_group_needs_a_connection_to_each_other_member() -> None:
    with pytest.raises(ValueError, match="each other rank"):
        DirectCommunicator("tp2", [], 0, 1.0, {})
