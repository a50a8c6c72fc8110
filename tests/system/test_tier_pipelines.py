"""A pipeline whose requests need several times what its devices hold: they wait on the host, and none is recomputed.

As `test_tier_exactness`, whose cluster has room for all that runs as soon as it is a pipeline.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pengserve.planners.types.events import EventKind
from tests.support.disturbed import ENDS_WITHIN_S
from tests.support.processes import InstanceProcess
from tests.support.traffic import TimedStream
from tests.support.waiting import until
from tests.system.test_tier_exactness import BLOCK_BYTES, Tiered, answers, requests, tiered_cluster

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

MEMORY_BYTES = (4 << 20) + 700_000  # of an instance: 3 MiB of weights, the rest for KV
HOST_BLOCKS = 300  # a restore has what comes there beside what goes
REQUESTS = requests(16, 60, longest=800)


@pytest.fixture(scope="module")
def expected(instances: list[InstanceProcess]) -> list[TimedStream]:
    return answers(instances, REQUESTS)


@pytest.fixture(scope="module")
def tiered(model: Path, expected: list[TimedStream]) -> Iterator[Tiered]:
    sizes = {"memory_bytes": MEMORY_BYTES, "host_bytes": HOST_BLOCKS * BLOCK_BYTES}
    with tiered_cluster(model, 2, REQUESTS, expected, degrees=(2,), **sizes) as made:
        yield made


class Held:
    """Streams of which orders have parked some; the others end."""

    def __init__(self, tiered: Tiered, layout: str, num_held: int) -> None:
        self.tiered = tiered
        tiered.cluster.set_layout(layout)
        tiered.cluster.park("hold")
        self._num_ends = len(tiered.cluster.events(EventKind.TRANSITION_END))
        self.live = [TimedStream() for _ in tiered.requests[:8]]
        pairs = zip(tiered.requests[:8], self.live, strict=True)
        self.running = [(i, tiered.traffic.start(**request, into=s)) for i, (request, s) in enumerate(pairs)]
        until(lambda: self.num_open() == num_held)
        self.counts = self.num_tokens()

    def num_open(self) -> int:
        return sum(not future.done() for _, future in self.running)

    def num_tokens(self) -> list[int]:
        return [len(stream.token_ids) for stream in self.live]

    def change(self, layout: str) -> None:
        """They stay parked, with their KV."""
        self.tiered.cluster.set_layout(layout)
        self.tiered.check_memory()
        time.sleep(0.5)
        assert self.num_tokens() == self.counts, f"an order keeps them parked in {layout}"

    def resume(self) -> None:
        self.tiered.cluster.park("resume")
        self.tiered.check_all(self.running)
        self.tiered.settle()

    def num_recomputed(self) -> int:
        ends = self.tiered.cluster.events(EventKind.TRANSITION_END)[self._num_ends :]
        return sum(end.data["num_recomputed"] for end in ends)


@pytest.mark.parametrize(
    ("layouts", "num_held"),
    [
        (["dp", "pp2", "dp", "tp2", "dp"], 4),
        (["tp2", "dp", "pp2"], 2),
        (["pp2", "dp"], 2),
        (["dp", "tp2"], 4),
    ],
)
def test_what_an_order_parked_stays_so_through_all_changes(tiered: Tiered, layouts: list[str], num_held: int) -> None:
    held = Held(tiered, layouts[0], num_held)
    for layout in layouts[1:]:
        held.change(layout)
    assert held.num_recomputed() == 0
    held.resume()


def totals(tiered: Tiered, *names: str) -> list[int]:
    return [tiered.total(f"total_{name}") for name in names]


@pytest.mark.parametrize("with_orders", [False, True])
def test_churn_recomputes_no_token(tiered: Tiered, with_orders: bool) -> None:
    tiered.cluster.set_layout("pp2")
    before = totals(tiered, "preemptions", "evicted_bytes", "brought_bytes", "parked")
    tiered.cluster.park_at_random(with_orders)
    tiered.check_all(tiered.start_all() + tiered.start_all())
    tiered.check_memory()
    after = totals(tiered, "preemptions", "evicted_bytes", "brought_bytes", "parked")
    assert after[0] == before[0], "what does not fit is parked"
    assert all(now > then for now, then in zip(after[1:], before[1:], strict=True))
    tiered.settle()


@pytest.mark.parametrize("layout", ["pp2", pytest.param("dp", marks=pytest.mark.faults)])
def test_copies_that_fail_end_the_host_tiers_and_no_request(
    model: Path, instances: list[InstanceProcess], layout: str
) -> None:
    """A pipeline dissolves, and in `dp` migrations are under way. Then `dp` serves with the devices alone; so do groups
    that are formed afterwards.
    """
    given = requests(14, 50)  # none of them too long for a device
    sizes = {"memory_bytes": MEMORY_BYTES, "host_bytes": HOST_BLOCKS * BLOCK_BYTES}
    with tiered_cluster(model, 2, given, answers(instances, given), degrees=(2,), **sizes) as tiered:
        keys = [instance.key for instance in tiered.cluster.snapshot().instances]
        tiered.cluster.set_layout(layout)
        running = tiered.start_all()
        if layout == "dp":
            until(lambda: any(i.stats.num_running for i in tiered.cluster.snapshot().instances))
            for source, target in ((0, 1), (1, 0)):
                tiered.migrate(source, target)
        tiered.cluster.park("break")
        tiered.check_all(running)
        tiered.cluster.set_layout("dp")
        tiered.check_all(tiered.start_all())
        until(lambda: not any(i.stats.host_blocks for i in tiered.cluster.snapshot().instances))
        for layout in ("tp2", "dp", "pp2"):
            tiered.cluster.set_layout(layout)
            tiered.check_memory()
            tiered.check_all(tiered.start_all())
        tiered.settle()
        assert [instance.key for instance in tiered.cluster.snapshot().instances] == keys, "none of them has died"


@pytest.fixture(scope="module")
def turns(instances: list[InstanceProcess], expected: list[TimedStream]) -> tuple[list[Any], list[TimedStream]]:
    """Second turns of the same conversations, and what plain instances answer."""
    pairs = zip(REQUESTS, expected, strict=True)
    given = [request | {"prompt": [*request["prompt"], *first.token_ids, 7, 8, 9]} for request, first in pairs]
    return given, answers(instances, given)


def test_second_turns_find_their_first_on_the_host(tiered: Tiered, turns: tuple[list[Any], list[TimedStream]]) -> None:
    tiered.cluster.set_layout("pp2")
    tiered.check_all(tiered.start_all())
    given, expected = turns
    before = totals(tiered, "host_hits", "preemptions")
    for future, wanted in [(tiered.traffic.start(**r), e) for r, e in zip(given, expected, strict=True)]:
        stream = future.result(ENDS_WITHIN_S)
        assert not stream.error and stream.token_ids == wanted.token_ids
    after = totals(tiered, "host_hits", "preemptions")
    assert after[0] > before[0] + 32 and after[1] == before[1]
    tiered.check_memory()
    tiered.settle()


def test_a_drop_takes_along_more_than_the_devices_of_the_pipeline_hold(tiered: Tiered) -> None:
    """What finds no block of the devices comes to the hosts of its members."""
    tiered.cluster.set_layout("pp2")
    num_blocks = max(instance.stats.device_blocks for instance in tiered.cluster.snapshot().instances)
    tiered.cluster.set_layout("dp")
    running = tiered.start_all()
    until(lambda: tiered.total("kv_blocks_used") > num_blocks + 20)
    num_ends, before = len(tiered.cluster.events(EventKind.TRANSITION_END)), totals(tiered, "preemptions")
    tiered.cluster.set_layout("pp2")
    ended = tiered.cluster.events(EventKind.TRANSITION_END)[num_ends]
    tiered.check_memory()
    tiered.check_all(running)
    assert ended.data["num_carried"] > 0 and ended.data["num_recomputed"] == 0
    assert totals(tiered, "preemptions") == before
    tiered.settle()


def test_a_restore_carries_what_is_on_the_host(tiered: Tiered) -> None:
    """Two requests that an order parks are the first to leave the devices."""
    tiered.cluster.set_layout("pp2")
    tiered.cluster.park("hold")
    before = totals(tiered, "evicted_bytes")
    running = tiered.start_all() + tiered.start_all()
    until(lambda: tiered.total("num_parked") >= 2 and totals(tiered, "evicted_bytes") > before)
    num_ends = len(tiered.cluster.events(EventKind.TRANSITION_END))
    tiered.cluster.set_layout("dp")
    ended = tiered.cluster.events(EventKind.TRANSITION_END)[num_ends]
    tiered.check_memory()
    tiered.cluster.park("resume")
    tiered.check_all(running)
    assert ended.data["num_carried"] >= 2 and ended.data["num_recomputed"] == 0
    tiered.settle()


@pytest.fixture(scope="module")
def wide(model: Path, expected: list[TimedStream]) -> Iterator[Tiered]:
    """Four instances: pipelines of two become one of four, and the other way round."""
    sizes = {"memory_bytes": MEMORY_BYTES, "host_bytes": HOST_BLOCKS * BLOCK_BYTES}
    with tiered_cluster(model, 4, REQUESTS, expected, degrees=(), **sizes) as made:
        yield made


def test_wider_and_narrower_pipelines_take_along_what_is_on_the_host(wide: Tiered) -> None:
    wide.cluster.set_layout("pp2")
    running = [*wide.start_all(), *wide.start_all(), *wide.start_all()]
    until(lambda: any(i.stats.num_parked for i in wide.cluster.snapshot().instances))
    num_ends = len(wide.cluster.events(EventKind.TRANSITION_END))
    for layout in ("pp4", "pp2", "dp"):
        wide.cluster.set_layout(layout)
        wide.check_memory()
    ends = wide.cluster.events(EventKind.TRANSITION_END)[num_ends:]
    wide.check_all(running)
    told = [(end.data["what"], end.data["num_carried"], end.data["num_recomputed"]) for end in ends]
    assert all(num_carried > 0 for _, num_carried, _ in told[:2]), told
    assert told[1][2] == 0, "what has no room on the devices of the narrower pipelines waits on their hosts"
    wide.settle()
