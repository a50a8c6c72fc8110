"""Laws of the pool: it holds exactly the groups it was told of; the failure of one is no other's."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pengserve.planners.types.directory import GroupSpec
from pengserve.planners.types.errors import EngineError, UnsupportedShapeError
from pengserve.replicas.comm.pool import CommunicatorPool
from tests.replicas.comm.local import LocalCluster


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    made = LocalCluster(3, timeout_s=1.0)
    yield made
    made.close()


def test_each_member_holds_the_groups_it_is_in(cluster: LocalCluster) -> None:
    pair, trio = cluster.spec(0, 1), cluster.spec(0, 1, 2)
    cluster.all(lambda member: member.pool.build([trio, pair]))
    assert [member.pool.ready() for member in cluster.members] == [(pair.name, trio.name)] * 2 + [(trio.name,)]
    with pytest.raises(EngineError, match="not ready"):
        cluster.members[2].pool.get(pair.name)


def test_built_groups_stay_and_unlisted_ones_end(cluster: LocalCluster) -> None:
    pair, trio = cluster.spec(0, 1), cluster.spec(0, 1, 2)
    cluster.all(lambda member: member.pool.build([trio, pair]))
    kept, dropped = cluster.members[0].pool.get(trio.name), cluster.members[0].pool.get(pair.name)
    cluster.all(lambda member: member.pool.build([trio]))
    assert cluster.members[0].pool.get(trio.name) is kept and not kept.is_broken
    assert cluster.members[0].pool.ready() == (trio.name,) and dropped.is_broken


def test_a_group_that_fails_stops_no_other_and_its_next_round_works(cluster: LocalCluster) -> None:
    pair, trio = cluster.spec(0, 1), cluster.spec(0, 1, 2)
    cluster.all(lambda member: member.pool.build([trio, pair]), among=(0, 1))  # the third was told nothing
    for member in cluster.members[:2]:
        assert member.pool.ready() == (pair.name,) and member.pool.failed() == (trio.name,)
    again = cluster.spec(0, 1, 2, round_=1)
    cluster.all(lambda member: member.pool.build([again, pair]))
    assert [member.pool.failed() for member in cluster.members] == [()] * 3
    group = [member.pool.get(again.name) for member in cluster.members]
    assert [float(t) for t in cluster.on(group, lambda c: c.all_reduce(torch.ones(1)))] == [3.0] * 3  # type: ignore[arg-type]


def test_a_lost_member_fails_its_groups_at_once(cluster: LocalCluster) -> None:
    cluster.members[2].network.close()
    specs = [cluster.spec(0, 2, round_=i) for i in range(10)]
    start_s = time.monotonic()
    cluster.members[0].pool.build(specs)
    assert time.monotonic() - start_s < 9.0  # a time-out each would be 10 s
    assert len(cluster.members[0].pool.failed()) == 10


def test_a_group_marked_failed_is_out_of_use_until_its_next_round(cluster: LocalCluster) -> None:
    pair = cluster.spec(0, 1)
    cluster.all(lambda member: member.pool.build([pair]))
    pool = cluster.members[0].pool
    pool.mark_failed(pair.name)
    pool.mark_failed("unknown")
    pool.build([pair])
    assert pool.failed() == (pair.name,) and pool.ready() == ()
    with pytest.raises(EngineError):
        pool.get(pair.name)
    with pytest.raises(EngineError):
        cluster.members[1].pool.get(pair.name).barrier()


def test_an_unknown_backend_is_refused(cluster: LocalCluster) -> None:
    with pytest.raises(UnsupportedShapeError, match="mpi"):
        CommunicatorPool(cluster.members[0].network, "cpu", 1.0, "mpi")


@pytest.mark.parametrize("error", [AssertionError, AttributeError, TypeError])
def test_an_unforeseen_fault_fails_its_group_alone_and_is_told(
    cluster: LocalCluster, error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair, trio = cluster.spec(0, 1), cluster.spec(0, 1, 2)
    connect = CommunicatorPool._connect

    def broken(pool: CommunicatorPool, spec: GroupSpec, undo: list[Any]) -> Any:
        if spec == pair:
            raise error("a fault of the test")
        return connect(pool, spec, undo)

    monkeypatch.setattr(CommunicatorPool, "_connect", broken)
    cluster.all(lambda member: member.pool.build([pair, trio]))
    for member in cluster.members[:2]:
        assert (member.pool.ready(), member.pool.failed()) == ((trio.name,), (pair.name,))
        assert member.pool.fault(pair.name) == f"{error.__name__}: a fault of the test"
        assert member.pool.fault(trio.name) == ""
    assert [record.exc_info is not None for record in caplog.records] == [True, True], "a traceback each"


def test_a_lost_peer_is_no_fault(cluster: LocalCluster) -> None:
    cluster.members[2].network.close()
    spec = cluster.spec(0, 2)
    cluster.members[0].pool.build([spec])
    assert cluster.members[0].pool.failed() == (spec.name,)
    assert cluster.members[0].pool.fault(spec.name) == "", "another round may help"
