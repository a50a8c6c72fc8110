"""Laws of live migration: a request goes on at another instance, and its client sees nothing of it.

- tokens and logprobs are those of the undisturbed request, also with seeds, penalties and cached prefixes;
- a grammar goes on where it stood;
- memory is conserved at both ends, and an order that comes twice is carried out once.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from pengserve.planners.types.errors import FenceError
from tests.support.elastic import elastic_cluster
from tests.support.migrating import ENDS_WITHIN_S, GRAMMAR, KINDS, Pair
from tests.support.streams import make_prompts
from tests.support.traffic import Traffic
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.shapes]


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
    before = pair.num_migrated()
    futures, _ = pair.start(requests)
    first = pair.order(0, 1)
    until(lambda: pair.num_running(0) == 0, timeout_s=120.0)
    pair.order(1, 0)
    until(lambda: pair.num_running(1) == 0, timeout_s=120.0)
    pair.give(0, first)
    with pytest.raises(FenceError, match="is for instance"):
        pair.give(1, first)
    pair.require_equal([future.result(ENDS_WITHIN_S) for future in futures], expected)
    # Counts come with the next statistics. Each request moves there and back.
    assert pair.num_migrated() - before <= 2 * len(requests), "the order was carried out twice"


def test_a_grammar_goes_on_where_it_stood(pair: Pair) -> None:
    requests = pair.requests((GRAMMAR, GRAMMAR | {"temperature": 0.8, "seed": 4}))
    expected = pair.undisturbed(requests)
    before = pair.num_migrated()
    futures, _ = pair.start(requests)
    pair.order(0, 1)
    until(lambda: pair.num_running(0) == 0, timeout_s=120.0)
    pair.order(1, 0)
    until(lambda: pair.num_running(1) == 0, timeout_s=120.0)
    pair.require_equal([future.result(ENDS_WITHIN_S) for future in futures], expected)
    assert pair.num_migrated() - before >= 2, "it was sent again from its tokens"


def test_a_target_without_room_changes_nothing(pair: Pair) -> None:
    filler = [{"prompt": make_prompts(1, seed=9, longest=300)[0], "max_tokens": 400}] * 2
    expected = pair.undisturbed(filler)
    futures, _ = pair.start(filler)
    before = pair.num_migrated()
    pair.order(0, 1, max_tokens=1)
    pair.order(1, 0, request_ids=("unknown",))
    pair.require_equal([future.result(ENDS_WITHIN_S) for future in futures], expected)
    assert pair.num_migrated() == before
