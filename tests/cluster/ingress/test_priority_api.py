"""Priorities of requests in flight: a change reaches the instance at once, or is refused with a sentence."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pengserve.cluster.ingress import errors
from pengserve.cluster.ingress.request.request_options import RequestOptions
from pengserve.cluster.ingress.steering.priority_api import priority_router
from pengserve.cluster.ingress.tenants.fair_queue import FairQueue
from pengserve.planners.types.contract import BUILT_IN_CLASSES, Contract
from pengserve.planners.types.tenants import FairnessConfig
from tests.support.moving import Cluster

CONTRACT = Contract(tenant="acme", session="s1", service_class="flex", priority=1)


@pytest.fixture(params=[True, False], ids=["fair", "plain"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    fair = FairQueue(FairnessConfig(is_on=True), BUILT_IN_CLASSES) if request.param else None
    found = Cluster(1, fair=fair)
    found.connect(found.instances[0])
    for number in range(3):
        contract = CONTRACT if number < 2 else replace(CONTRACT, session="s2", service_class="default")
        found.request(number, 4, RequestOptions(contract=contract), priority=1)
    return found


@pytest.fixture
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    app = FastAPI()
    errors.install(app)
    app.include_router(priority_router(lambda: cluster.book, BUILT_IN_CLASSES, goes_by_priority=True))
    with TestClient(app) as client:
        yield client


def test_a_change_reaches_the_instance_and_stays(cluster: Cluster, http: httpx.Client) -> None:
    answer = http.put("/cluster/requests/r2/priority", json={"priority": -3, "tenant": "acme"})
    assert answer.json() == {"requests": 1, "priority": -3}
    link: Any = cluster.open_links[cluster.instances[0].key]
    told = -6 if cluster.book._order.fair is not None else -3  # twice, as tenants ahead of their shares come between
    assert link.orders["r2"][0] == told
    record = next(record for record in cluster.book.records() if record.request_id == "r2")
    assert record.is_urgent and record.request.priority == told and cluster.book.demand().num_priority == 1
    cluster.settle()
    assert cluster.ended == {0, 1, 2}


def test_all_requests_of_a_session_change(cluster: Cluster, http: httpx.Client) -> None:
    assert http.put("/cluster/sessions/s1/priority", json={"priority": 0}).json()["requests"] == 2
    assert sorted(record.priority for record in cluster.book.records()) == [0, 0, 1]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("requests/gone", {"priority": 0}, 404, "it has ended, or another ingress has it"),
        ("sessions/gone", {"priority": 0}, 404, "no session 'gone' is in flight"),
        ("requests/r0", {"priority": 0, "tenant": "other"}, 403, "belongs to another tenant"),
        ("requests/r0", {"priority": -1}, 400, "class flex may have priorities from 0 to any, got -1"),
        ("requests/r0", {"priority": "1"}, 400, "priority: a whole number"),
        ("requests/r0", {"priority": 1 << 40}, 400, "priority: a whole number"),
        ("requests/r0", {"priority": True}, 400, "priority: a whole number"),
        ("requests/r0", {}, 400, "priority: a whole number"),
        ("requests/r0", {"priority": 0, "class": "x"}, 400, "class: only priority and tenant"),
        ("requests/r0", {"priority": 0, "tenant": 7}, 400, "tenant: a string"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    answer = http.put(f"/cluster/{path}/priority", json=body)
    assert answer.status_code == status and words in answer.json()["error"]["message"]


def test_an_ended_request_is_gone(cluster: Cluster, http: httpx.Client) -> None:
    cluster.settle()
    assert http.put("/cluster/requests/r0/priority", json={"priority": 0}).status_code == 404


def test_where_schedulers_heed_no_priority_it_says_so(cluster: Cluster) -> None:
    app = FastAPI()
    errors.install(app)
    app.include_router(priority_router(lambda: cluster.book, BUILT_IN_CLASSES, goes_by_priority=False))
    with TestClient(app) as client:
        answer = client.put("/cluster/requests/r0/priority", json={"priority": 0})
    assert answer.status_code == 400 and "engine.scheduling_policy" in answer.json()["error"]["message"]
