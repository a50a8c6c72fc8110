"""Requests with SLOs and paced streams give the tokens that they give without, in each shape, wherever KV is.

As `test_tier_exactness`, on instances that place KV by SLOs (`memory.place_by_slo`): layers leave for the host, or
requests are paused, as the link allows.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pengserve.planners.types.events import EventKind
from tests.support.disturbed import ENDS_WITHIN_S
from tests.support.processes import InstanceProcess
from tests.support.traffic import TimedStream
from tests.support.waiting import until
from tests.system.test_tier_exactness import (
    BLOCK_BYTES,
    HOST_BLOCKS,
    MEMORY_BYTES,
    Tiered,
    answers,
    requests,
    tiered_cluster,
)

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

REQUESTS = requests(14, 60)
SLOS: list[dict[str, Any] | None] = [{"tbt_ms": 40, "pacing": "steady"}, {"tbt_ms": 40}, None]
SHORT_BYTES = MEMORY_BYTES[4]  # in a pipeline of two, which lacks KV then
FAST, SLOW = 2e9, 3e7  # bytes a second: a step brings thousands of blocks of a layer, or a few


def with_slos(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Paced ones, others with an SLO, and some without, in turn."""
    made: list[dict[str, Any]] = []
    for i, request in enumerate(given):
        slo = SLOS[i % len(SLOS)]
        made.append({**request, "stream_options": {"include_usage": True}, **({"slo": slo} if slo else {})})
    return made


@pytest.fixture(scope="module")
def expected(instances: list[InstanceProcess]) -> list[TimedStream]:
    """Of plain instances, without SLOs."""
    return answers(instances, REQUESTS)


class Placed(Tiered):
    """A cluster that places KV by SLOs."""

    link_bytes_per_s: float

    def notes(self, shape: str) -> list[dict[str, Any]]:
        """What instances in this shape have told of placements."""
        told = self.cluster.events(EventKind.PLACEMENT_CHANGED)
        return [event.data for event in told if event.data["shape"] == shape]

    def check_contracts(self, running: "list[tuple[int, Any]]") -> int:
        """Each request with an SLO is told what was kept of it, and no other; the longest pause, in ms."""
        usages = [(index, future.result(ENDS_WITHIN_S).usage) for index, future in running]
        for index, usage in usages:
            assert ("pengserve" in usage) is ("slo" in self.requests[index]), usage
        return max(usage["pengserve"]["paused_ms"] for _, usage in usages if "pengserve" in usage)


@pytest.fixture(scope="module", params=[FAST, SLOW])
def placed(request: pytest.FixtureRequest, model: Path, expected: list[TimedStream]) -> Iterator[Placed]:
    with tiered_cluster(
        model,
        2,
        with_slos(REQUESTS),
        expected,
        degrees=(2,),
        memory_bytes=MEMORY_BYTES[2],
        host_bytes=HOST_BLOCKS * BLOCK_BYTES,
        link_bytes_per_s=request.param,
        places_by_slo=True,
    ) as made:
        found = Placed(made.cluster, made.traffic, made.requests, made.expected)
        found.link_bytes_per_s = request.param
        yield found


@pytest.mark.parametrize("shape", ["dp", "tp2"])
def test_tokens_are_the_same_while_kv_is_placed_by_slos(placed: Placed, shape: str) -> None:
    placed.cluster.set_layout(shape)
    before = placed.total("total_preemptions")
    running = placed.start_all() + placed.start_all()
    placed.check_all(running)
    placed.check_memory()
    assert placed.total("total_preemptions") == before, "what does not fit is paused, or has layers on the host"
    paused_ms = placed.check_contracts(running)
    # Over the fast link, layers that are away may pay or not: that is for measured steps to say.
    until(lambda: any(note["num_paused"] or note["num_away"] for note in placed.notes(shape)))
    if placed.link_bytes_per_s == SLOW:
        until(lambda: any(note["num_paused"] for note in placed.notes(shape)))
        assert paused_ms > 0
    placed.cluster.require_layout(shape)
    placed.settle()


def test_a_pipeline_that_lacks_kv_places_it_by_slos(model: Path, instances: list[InstanceProcess]) -> None:
    """Requests are paused, or have layers on the hosts of all stages, and none is computed again."""
    given = requests(16, 60, longest=800)
    sizes = {"memory_bytes": SHORT_BYTES, "host_bytes": HOST_BLOCKS * BLOCK_BYTES, "places_by_slo": True}
    expected = answers(instances, given)
    with tiered_cluster(model, 2, with_slos(given), expected, degrees=(2,), **sizes) as made:
        short = Placed(made.cluster, made.traffic, made.requests, made.expected)
        short.cluster.set_layout("pp2")
        before = short.total("total_preemptions"), short.total("total_parked")
        running = short.start_all() + short.start_all()
        short.check_all(running)
        short.check_memory()
        short.check_contracts(running)
        assert short.total("total_preemptions") == before[0] and short.total("total_parked") > before[1]
        until(lambda: any(note["num_paused"] or note["num_away"] for note in short.notes("pp2")))
        short.settle()


def test_what_is_placed_or_paused_comes_along_through_changes_of_shape(placed: Placed) -> None:
    num_ends = len(placed.cluster.events(EventKind.TRANSITION_END))
    running = placed.start_all()
    for shape in ("tp2", "dp", "pp2", "dp"):
        placed.cluster.set_layout(shape)
        placed.check_memory()
        running += placed.start_all()
    placed.check_all(running)
    placed.check_contracts(running)
    ends = placed.cluster.events(EventKind.TRANSITION_END)[num_ends:]
    assert sum(end.data["num_carried"] for end in ends) > 0
    placed.settle()
