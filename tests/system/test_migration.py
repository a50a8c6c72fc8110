"""Laws of live migration: a request goes on at another instance, and its client sees nothing of it.

- tokens and logprobs are those of the undisturbed request, also with seeds, penalties and cached prefixes;
- what cannot be carried stays, or is sent again from its tokens where it must leave;
- memory is conserved at both ends, and an order that comes twice is carried out once.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from pengserve.planners.types.errors import FenceError
from pengserve.planners.types.orders import Migrate
from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.streams import make_prompts
from tests.support.traffic import TimedStream, Traffic
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

ENDS_WITHIN_S = 400.0
MAX_TOKENS = 160
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 7, "top_p": 0.95},
    {"frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"logprobs": 3},
    {"temperature": 0.9, "seed": 11, "min_p": 0.02, "repetition_penalty": 1.1},
)
GRAMMAR = {"structured_outputs": {"regex": "[a-z ]{400,}"}}


class Pair:
    """Two instances, and streams between them."""

    def __init__(self, cluster: ElasticCluster, traffic: Traffic) -> None:
        self.cluster, self.traffic = cluster, traffic
        self._num_orders = 0

    def requests(self, kinds: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
        """One of each kind, with prompts of one and of several blocks."""
        prompts = make_prompts(len(kinds), seed=5, longest=300)
        return [{"prompt": p, "max_tokens": MAX_TOKENS, **kind} for p, kind in zip(prompts, kinds, strict=True)]

    def start(self, requests: list[dict[str, Any]]) -> tuple[list["Future[TimedStream]"], list[TimedStream]]:
        """Begins streams and waits until all decode."""
        live = [TimedStream() for _ in requests]
        futures = [self.traffic.start(**r, into=stream) for r, stream in zip(requests, live, strict=True)]
        until(lambda: all(len(stream.token_ids) > 3 for stream in live), timeout_s=240.0)
        return futures, live

    def undisturbed(self, requests: list[dict[str, Any]]) -> list[TimedStream]:
        """What they give when nothing moves."""
        return [future.result(ENDS_WITHIN_S) for future in self.start(requests)[0]]

    def order(self, source: int, target: int, **fields: Any) -> Migrate:
        """Orders `source` to send what runs there to `target`."""
        self._num_orders += 1
        order = Migrate(
            order_id=f"order-{self._num_orders}",
            source=self.cluster.key(source),
            target=self.cluster.key(target),
            **({"max_tokens": 1 << 20} | fields),
        )
        self.give(source, order)
        return order

    def give(self, instance_id: int, order: Migrate) -> None:
        """As `order`, of one that there is."""
        self.cluster.call(self.cluster.port.order(self.cluster.key(instance_id), [order]))

    def num_migrated(self) -> int:
        """Requests that have left an instance with their KV, since the instances began."""
        return sum(instance.stats.total_migrated for instance in self.cluster.snapshot().instances)

    def num_running(self, instance_id: int) -> int:
        """Requests that run there."""
        return self.cluster.snapshot().instances[instance_id].stats.num_running

    def require_equal(self, streams: list[TimedStream], expected: list[TimedStream]) -> None:
        """Tokens, logprobs and ends are the same."""
        assert [stream.error for stream in streams] == [""] * len(streams)
        for i, (stream, other) in enumerate(zip(streams, expected, strict=True)):
            assert stream.token_ids == other.token_ids, f"stream {i}"
            assert stream.finish_reason == other.finish_reason
            assert stream.logprobs == pytest.approx(other.logprobs, abs=1e-4), f"stream {i}"
        self.cluster.require_memory()


@pytest.fixture(scope="module")
def pair(model: Any) -> Iterator[Pair]:
    with elastic_cluster(model, 2) as cluster, cluster.ingress() as url, Traffic(url) as traffic:
        yield Pair(cluster, traffic)


def test_streams_of_all_kinds_move_to_and_fro(pair: Pair) -> None:
    requests = pair.requests(KINDS)
    expected = pair.undisturbed(requests)
    before = pair.num_migrated()
    futures, live = pair.start(requests)
    while not all(future.done() for future in futures):
        pair.order(0, 1)
        time.sleep(0.1)
        pair.order(1, 0)
        time.sleep(0.1)
    pair.require_equal([future.result(ENDS_WITHIN_S) for future in futures], expected)
    assert pair.num_migrated() - before >= len(requests), "hardly anything moved"
    assert all(len(stream.times_s) > 1 for stream in live)


def test_an_order_counts_once_and_for_one_life(pair: Pair) -> None:
    requests = pair.requests(({},) * 4)
    expected = pair.undisturbed(requests)
    futures, _ = pair.start(requests)
    first = pair.order(0, 1)
    until(lambda: pair.num_running(0) == 0, timeout_s=120.0)
    pair.order(1, 0)
    until(lambda: pair.num_running(1) == 0, timeout_s=120.0)
    moved = pair.num_migrated()
    pair.give(0, first)
    with pytest.raises(FenceError, match="is for instance"):
        pair.give(1, first)
    pair.require_equal([future.result(ENDS_WITHIN_S) for future in futures], expected)
    assert pair.num_migrated() == moved, "the order was carried out twice"


def test_a_grammar_stays_until_it_must_leave(pair: Pair) -> None:
    requests = pair.requests((GRAMMAR, {}))
    expected = pair.undisturbed(requests)
    futures, _ = pair.start(requests)
    source = 0 if pair.num_running(0) else 1
    pair.order(source, 1 - source)
    pair.order(1 - source, source, must_leave=True)
    pair.order(source, 1 - source, must_leave=True)
    pair.require_equal([future.result(ENDS_WITHIN_S) for future in futures], expected)


def test_a_target_without_room_changes_nothing(pair: Pair) -> None:
    filler = [{"prompt": make_prompts(1, seed=9, longest=300)[0], "max_tokens": 400}] * 2
    expected = pair.undisturbed(filler)
    futures, _ = pair.start(filler)
    before = pair.num_migrated()
    pair.order(0, 1, max_tokens=1)
    pair.order(1, 0, request_ids=("unknown",))
    pair.require_equal([future.result(ENDS_WITHIN_S) for future in futures], expected)
    assert pair.num_migrated() == before
