"""Laws of live migration between groups of all shapes, with real engines: the client sees nothing of it."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pengserve.planners.types.events import EventKind
from tests.support.elastic import elastic_cluster
from tests.support.migrating import ENDS_WITHIN_S, KINDS, Pair
from tests.support.traffic import TimedStream, Traffic
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

MEMORY_BYTES = 24 << 20  # of an instance: 3 MiB of weights, and KV that all requests fit into
SHAPES = ("dp", "tp2", "pp2")


class Groups(Pair):
    """Two groups, led by instances 0 and 2, and what the requests of all kinds give when nothing moves."""

    expected: list[TimedStream]


@pytest.fixture(scope="module")
def groups(model: Any) -> Iterator[Groups]:
    with (
        elastic_cluster(model, 4, degrees=(2, 4), max_stages=4, max_in_flight=2, memory_bytes=MEMORY_BYTES) as cluster,
        cluster.ingress() as url,
        Traffic(url) as traffic,
    ):
        found = Groups(cluster, traffic)
        found.expected = found.undisturbed(found.requests(KINDS))
        yield found


def layout(source: str, target: str) -> str:
    """The layout with these groups, led by instances 0 and 2; the other instances are alone."""
    return " ".join(
        f"{shape}@({first},{first + 1})" if shape != "dp" else f"dp@({first}) dp@({first + 1})"
        for shape, first in ((source, 0), (target, 2))
    )


@pytest.mark.parametrize("target", SHAPES)
@pytest.mark.parametrize("source", SHAPES)
def test_streams_of_all_kinds_move_to_and_fro(groups: Groups, source: str, target: str) -> None:
    groups.cluster.set_layout(layout(source, target))
    before = groups.num_migrated()
    futures, _ = groups.start(groups.requests(KINDS))
    while not all(future.done() for future in futures):
        groups.order(0, 2)
        time.sleep(0.15)
        groups.order(2, 0)
        time.sleep(0.15)
    groups.require_equal([future.result(ENDS_WITHIN_S) for future in futures], groups.expected)
    assert groups.num_migrated() - before >= len(KINDS), "hardly anything moved"


def test_all_that_runs_in_a_group_moves_to_another(groups: Groups) -> None:
    groups.cluster.set_layout("tp2@(0,1) pp2@(2,3)")
    futures, _ = groups.start(groups.requests(KINDS))
    groups.order(0, 2)
    until(lambda: groups.num_running(0) == 0, timeout_s=120.0)
    groups.require_equal([future.result(ENDS_WITHIN_S) for future in futures], groups.expected)


@pytest.mark.parametrize("instance_id", [1, pytest.param(2, marks=pytest.mark.faults)])
def test_a_member_of_a_group_drains_and_no_request_loses_anything(groups: Groups, instance_id: int) -> None:
    """A follower of a tensor-parallel group, and the leader of a pipeline."""
    cluster = groups.cluster
    cluster.set_layout("tp2@(0,1) pp2@(2,3)")
    num_ends = len(cluster.events(EventKind.TRANSITION_END))
    futures, _ = groups.start(groups.requests(KINDS))
    url = f"{groups.traffic.url}/cluster/instances/{instance_id}"
    assert httpx.post(f"{url}/drain", json={"timeout_s": 120}).json()["phase"] == "leaving"
    until(lambda: httpx.get(f"{url}/drain").json()["safe_to_delete"], timeout_s=240.0)
    groups.require_streams([future.result(ENDS_WITHIN_S) for future in futures], groups.expected)
    (end,) = cluster.events(EventKind.TRANSITION_END)[num_ends:]
    assert "being drained" in end.why
    assert not cluster.events(EventKind.INSTANCE_DRAIN_ERROR)
    assert httpx.post(f"{url}/undrain", json={}).status_code == 200
    cluster.wait_formable()
