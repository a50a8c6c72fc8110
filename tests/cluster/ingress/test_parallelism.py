"""Wishes and lengths over HTTP, with real instances that run `dp`."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from pengserve.cluster.ingress.config import LimitConfig
from tests.support.ingress import FixedRoutes, ingress_config, serving, wait_ready
from tests.support.processes import ENGINE, InstanceProcess

WIDE = 2 * ENGINE["max_model_len"]  # what a group of two would hold
WAIT_S = 1.5  # longer than an answer of a few tokens takes on a slow machine
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
HEADER = "x-pengserve-parallelism"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def routes(instances: list[InstanceProcess]) -> FixedRoutes:
    routes = FixedRoutes()
    routes.show(instances, max_model_len=WIDE)
    return routes


@pytest.fixture(scope="module")
def api(instances: list[InstanceProcess], routes: FixedRoutes) -> Iterator[httpx.Client]:
    """An ingress of a cluster that could form pairs, if it had a controller."""
    config = ingress_config(
        instances,
        instance=replace(instances[0].config, degrees=(2, 8)),
        limits=LimitConfig(parallelism_wait_s=WAIT_S, no_instance_timeout_s=2.0),
    )
    with serving(config, routes) as url:
        wait_ready(url)
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            yield client


@pytest.mark.parametrize("value", ["tp8", "tp3", "fast", "", "tp-1", "2"])
def test_a_header_that_cannot_be_met_is_refused_by_name(api: httpx.Client, value: str) -> None:
    answer = api.post("/v1/completions", json=BODY, headers={HEADER: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == HEADER and "auto, dp, tp, tp2" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "is_stream"), [("/v1/completions", BODY, False), ("/v1/chat/completions", CHAT, True)]
)
@pytest.mark.parametrize(("value", "waits"), [("auto", False), ("dp", False), ("tp", True), ("tp2", True)])
def test_a_wish_waits_a_while_and_never_fails(
    api: httpx.Client, path: str, body: dict, value: str, waits: bool, is_stream: bool
) -> None:
    started_s = time.monotonic()
    answer = api.post(path, json={**body, "stream": is_stream}, headers={HEADER: value})
    seconds = time.monotonic() - started_s
    assert answer.status_code == 200, answer.text
    assert (seconds >= WAIT_S) == waits


def test_the_controller_hears_of_wishes_and_of_the_end(api: httpx.Client, routes: FixedRoutes) -> None:
    routes.demands.clear()
    api.post("/v1/completions", json={**BODY, "n": 3}, headers={HEADER: "tp2"})
    deadline_s = time.monotonic() + 40
    while not (routes.demands and routes.demands[-1].num_running == routes.demands[-1].num_waiting == 0):
        assert time.monotonic() < deadline_s, routes.demands
        time.sleep(0.05)
    assert ((2, 3),) in [demand.wanted_degrees for demand in routes.demands]
    count = len(routes.demands)
    time.sleep(1.0)
    assert len(routes.demands) == count


@pytest.mark.parametrize("priority", [-5, 0, 7])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_priority_is_taken(api: httpx.Client, path: str, body: dict, priority: int) -> None:
    assert api.post(path, json={**body, "priority": priority}).status_code == 200


@pytest.mark.parametrize("priority", ["high", 2**63, 1.5])
def test_a_priority_that_is_none_is_refused(api: httpx.Client, priority: object) -> None:
    assert api.post("/v1/completions", json={**BODY, "priority": priority}).status_code == 400


# vLLM refuses what cannot fit by itself, and shortens an answer that does not fit behind its prompt.
@pytest.mark.parametrize("more", [{"max_tokens": WIDE + 1}, {"prompt": [5] * (WIDE + 1)}], ids=["out", "in"])
def test_what_no_group_can_hold_is_refused_with_the_limit(api: httpx.Client, more: dict) -> None:
    answer = api.post("/v1/completions", json={**BODY, **more})
    assert answer.status_code == 400
    assert str(WIDE) in answer.json()["error"]["message"]


def test_the_model_s_length_is_that_of_the_widest_group(api: httpx.Client) -> None:
    assert api.get("/v1/models").json()["data"][0]["max_model_len"] == WIDE


@pytest.mark.parametrize(
    "body", [{**BODY, "prompt": [5] * (WIDE // 2 + 100)}, {**BODY, "max_tokens": WIDE // 2 + 100}], ids=["in", "out"]
)
def test_what_only_a_group_can_hold_waits_for_one(api: httpx.Client, routes: FixedRoutes, body: dict) -> None:
    routes.demands.clear()
    assert api.post("/v1/completions", json=body).status_code == 503, "nobody forms the group here"
    longest = max(demand.longest_waiting_tokens for demand in routes.demands)
    assert WIDE // 2 + 100 < longest < WIDE // 2 + 200


def test_an_answer_without_a_bound_ends_at_the_limit_of_its_lane(api: httpx.Client) -> None:
    answer = api.post("/v1/chat/completions", json={**CHAT, "max_tokens": None, "ignore_eos": True}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == WIDE // 2


async def test_wishes_of_requests_side_by_side_do_not_mix(api: httpx.Client, routes: FixedRoutes) -> None:
    routes.demands.clear()
    async with httpx.AsyncClient(base_url=api.base_url, timeout=60, trust_env=False) as client:
        values = ["tp2", "dp", "auto", None] * 4
        answers = await asyncio.gather(
            *(
                client.post("/v1/completions", json={**BODY, "stream": True}, headers={HEADER: v} if v else {})
                for v in values
            )
        )
    assert {answer.status_code for answer in answers} == {200}
    assert max(dict(demand.wanted_degrees).get(2, 0) for demand in routes.demands) == 4
