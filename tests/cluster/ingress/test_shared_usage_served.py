"""Two real ingresses over one real instance: a tenant that floods both is served no more than one that asks one.

Each ingress knows at once what it has charged itself, and what the other one has charged within the staleness that
`UsageSharing` states. So the flood's share is right as soon as service takes much longer than that.
"""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from pengserve.planners.types.tenants import FairnessConfig
from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.traffic import TimedStream, Traffic

pytestmark = pytest.mark.slow

GUEST_REQUESTS, FLOOD_REQUESTS = (
    20,
    30,
)  # the flood's to each ingress, more than end before the guest's
NUM_TOKENS, PLACES = 120, 2
ENDS_WITHIN_S = 400.0


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[ElasticCluster]:
    engine = {"scheduling_policy": "priority", "max_num_seqs": PLACES}
    with elastic_cluster(model, 1, degrees=(), engine=engine) as found:
        yield found


def flood_tokens_by_one_of_the_guest(cluster: ElasticCluster, num_ingresses: int) -> float:
    """Tokens that the flood has until the guest's last one, by those that the guest has.

    Args:
        num_ingresses: that each of the two ingresses believes in: with 1 it shares nothing.
    """
    config = {"num_ingresses": num_ingresses, "is_tenant_trusted": True, "fairness": FairnessConfig(is_on=True)}
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(Traffic(stack.enter_context(cluster.ingress(**config)))) for _ in "ab")

        found = {"flood": TimedStream(), "guest": TimedStream()}

        def send(traffic: Traffic, tenant: str, number: int) -> "Future[TimedStream]":
            headers = {"x-pengserve-tenant": tenant}
            return traffic.start([3 + number, 5, 7], NUM_TOKENS, headers=headers, into=found[tenant])

        flood = [send(traffic, "flood", number) for number in range(FLOOD_REQUESTS) for traffic in (first, second)]
        guest = [send(first, "guest", number) for number in range(GUEST_REQUESTS)]
        done, _ = wait(guest, ENDS_WITHIN_S)
        flood_tokens, guest_tokens = (len(found[tenant].token_ids) for tenant in ("flood", "guest"))
        assert len(done) == GUEST_REQUESTS and guest_tokens == GUEST_REQUESTS * NUM_TOKENS, found["guest"].error
        assert not all(future.done() for future in flood), "the flood has to last"
        for future in flood:
            future.cancel()
    return flood_tokens / guest_tokens


def test_a_flood_over_two_ingresses_has_one_share(cluster: ElasticCluster) -> None:
    assert flood_tokens_by_one_of_the_guest(cluster, 2) < 1.4


def test_ingresses_that_share_nothing_give_it_two(cluster: ElasticCluster) -> None:
    """The measure tells the difference."""
    assert flood_tokens_by_one_of_the_guest(cluster, 1) > 1.6
