"""Laws of the peer store: what one member sets all can get, and waiting for a lost member ends at once."""

import threading
import time
from collections.abc import Iterator

import pytest

from pengserve.planners.types.errors import LinkLostError
from pengserve.replicas.comm.store import PeerStore
from tests.replicas.comm.local import LocalCluster


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    made = LocalCluster(2)
    yield made
    made.close()


def stores(cluster: LocalCluster, group: str = "tp2", timeout_s: float = 3.0) -> list[PeerStore]:
    keys = [member.network.key for member in cluster.members]
    return [PeerStore(member.pool.board, group, keys, timeout_s) for member in cluster.members]


def test_a_value_reaches_every_member_and_no_other_group(cluster: LocalCluster) -> None:
    first, second = stores(cluster)
    other = stores(cluster, "another", 0.1)[1]
    first.set("0", b"zero")
    second.set("1", "one")
    assert [s.get(k) for s in (first, second) for k in "01"] == [b"zero", b"one"] * 2
    assert first.check(["0", "1"]) and not other.check(["0"])
    with pytest.raises(LinkLostError, match="another"):
        other.get("0")


def test_a_value_that_comes_later_wakes_the_waiter(cluster: LocalCluster) -> None:
    first, second = stores(cluster)
    threading.Timer(0.1, first.set, ["late", b"value"]).start()
    second.wait(["late"])
    assert second.get("late") == b"value"


def test_waiting_for_a_lost_member_ends_at_once(cluster: LocalCluster) -> None:
    start_s = time.monotonic()
    threading.Timer(0.1, cluster.members[1].network.close).start()
    with pytest.raises(LinkLostError, match=r"1\.0"):
        stores(cluster, timeout_s=10.0)[0].get("never")
    assert time.monotonic() - start_s < 9.0
