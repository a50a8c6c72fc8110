"""Laws of redirects: what waits without KV begins elsewhere, with the tokens that it would have given.

Memory is too small for all, so that requests wait, and some that have begun are preempted: these go on from their
tokens. They are sent to and fro, also where there is no room.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pengserve.planners.types.config import MigrateConfig
from pengserve.planners.types.orders import Redirect
from tests.support.elastic import ElasticCluster, started
from tests.support.migrating import ENDS_WITHIN_S, KINDS, Pair
from tests.support.streams import make_prompts
from tests.support.traffic import Traffic

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

KV_BYTES = 24 * 64 * 1024  # blocks of 32 tokens: three or four of these requests in the end


@pytest.fixture(scope="module")
def pair(model: Any) -> Iterator[Pair]:
    cluster = ElasticCluster(model, 2, engine={"kv_cache_memory_bytes": KV_BYTES})
    cluster.config = replace(cluster.config, migrate=MigrateConfig(redirects=False))  # by hand alone
    with started(cluster), cluster.ingress() as url, Traffic(url) as traffic:
        yield Pair(cluster, traffic)


def test_what_waits_without_kv_begins_elsewhere_with_the_same_tokens(pair: Pair) -> None:
    kinds = KINDS + KINDS[:4]
    prompts = make_prompts(len(kinds), seed=6, longest=120)
    requests = [{"prompt": p, "max_tokens": 160, **kind} for p, kind in zip(prompts, kinds, strict=True)]
    expected = [pair.traffic.start(**request).result(ENDS_WITHIN_S) for request in requests]
    assert num_sent_back(pair) == num_preempted(pair) == 0
    futures, number = [pair.traffic.start(**request) for request in requests], 0
    while not all(future.done() for future in futures):
        for source in (0, 1):
            number += 1
            redirect(pair, source, 1 - source, f"redirect-{number}")
            time.sleep(0.2)
    pair.require_equal([future.result(ENDS_WITHIN_S) for future in futures], expected)
    assert num_sent_back(pair) >= 2 and num_preempted(pair) > 0


def redirect(pair: Pair, source: int, target: int, name: str) -> None:
    """Orders what waits at `source` to be sent to `target`; as much as a third of the memory holds."""
    of = pair.cluster.key
    order = Redirect(order_id=name, source=of(source), target=of(target), max_tokens=256)
    pair.cluster.call(pair.cluster.port.order(of(source), [order]))


def num_sent_back(pair: Pair) -> int:
    """Requests that instances have told the ingress to send again."""
    return sum(one.stats.total_sent_back for one in pair.cluster.snapshot().instances)


def num_preempted(pair: Pair) -> int:
    """Preemptions so far."""
    return sum(one.stats.total_preemptions for one in pair.cluster.snapshot().instances)
