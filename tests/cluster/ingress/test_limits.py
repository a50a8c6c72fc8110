"""Keys, sizes, counts, overload and the routes of the cluster."""

import asyncio
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from pengserve.client import PengServe, PengServeAPIError
from pengserve.cluster.ingress.config import LimitConfig
from pengserve.planners.types.cluster_id import CLUSTER_HEADER, cluster_id
from tests.support.ingress import FixedRoutes, ingress_config, serving, wait_ready
from tests.support.processes import InstanceProcess

KEY, ADMIN_KEY = "key-of-the-tests", "admin-key-of-the-tests"
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
LONG = {**BODY, "max_tokens": 900, "stream": True}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def strict(instances: list[InstanceProcess]) -> Iterator[str]:
    """An ingress with keys, on one instance of 16 slots, that lets four sequences wait."""
    config = ingress_config(
        instances,
        api_keys=(KEY, "another"),
        admin_key=ADMIN_KEY,
        limits=LimitConfig(max_body_bytes=10_000, max_n=3, max_stop_strings=2, max_queued_requests=4),
    )
    with serving(config, FixedRoutes(instances[:1])) as url:
        wait_ready(url)
        yield url


@pytest.fixture
def api(strict: str) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=strict, headers={"Authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False
    ) as client:
        yield client


@pytest.mark.parametrize("key", [None, "", KEY[:-1], KEY + "x", "Bearer"])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/tokenize", "/tokenize/", "/v1/models", "/v1/models/tiny", "/v1/x"]
)
def test_without_the_key_nothing_is_served(strict: str, path: str, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}".strip()}
    with httpx.Client(base_url=strict, headers=headers, trust_env=False) as client:
        answer = client.get(path) if "models" in path else client.post(path, json=BODY)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert KEY not in answer.text


def test_a_request_that_means_another_cluster_is_refused(
    strict: str, api: httpx.Client, instances: list[InstanceProcess]
) -> None:
    own = cluster_id(instances[0].config.channel_token)
    for path in ("/live", "/ready", "/v1/models"):
        assert api.get(path, headers={CLUSTER_HEADER: own}).status_code == 200
        assert api.get(path, headers={CLUSTER_HEADER: "another"}).status_code == 421
    other = PengServe(strict, admin_key=ADMIN_KEY, cluster_id="another")
    with other, pytest.raises(PengServeAPIError, match="belongs to another PengServe cluster"):
        other.drain(1.0)
    with PengServe(strict, admin_key=ADMIN_KEY, cluster_id=own) as client:
        assert client.status().app == "tests"


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/ping", "/version"])
def test_probes_need_no_key(strict: str, path: str) -> None:
    assert httpx.get(f"{strict}{path}", trust_env=False).status_code == 200


def test_the_admin_key_opens_the_cluster_and_the_api_key_does_not(strict: str, api: httpx.Client) -> None:
    for path in ("/cluster/status", "/cluster/events", "/cluster/routing"):
        assert api.get(path).status_code == 401
        assert api.get(path, headers={"x-pengserve-admin-key": ADMIN_KEY}).status_code == 200
        assert api.get(path, headers={"Authorization": f"Bearer {ADMIN_KEY}"}).status_code == 200
    assert api.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {ADMIN_KEY}"}).status_code == 401


def test_events_come_after_a_number_and_bad_numbers_are_named(strict: str) -> None:
    with httpx.Client(base_url=strict, headers={"x-pengserve-admin-key": ADMIN_KEY}, trust_env=False) as client:
        events = client.get("/cluster/events", params={"after": 1, "limit": 1}).json()["events"]
        assert [event["seq"] for event in events] == [2]
        for params in ({"limit": 0}, {"limit": "x"}, {"after": -1}, {"after": 2**70}):
            answer = client.get("/cluster/events", params=params)
            assert answer.status_code == 400, params
            assert next(iter(params)) in answer.json()["error"]["param"]


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "ünique", '"><script>'])
def test_a_strange_request_id_is_replaced(api: httpx.Client, given: str) -> None:
    answer = api.get("/live", headers={"x-request-id": given.encode()})
    assert answer.headers["x-request-id"] not in ("", given)


@pytest.mark.parametrize("path", ["/live", "/nowhere", "/v1/completions"])
def test_a_sane_request_id_comes_back(api: httpx.Client, path: str) -> None:
    assert api.get(path, headers={"x-request-id": "my-id_1.2:3"}).headers.get_list("x-request-id") == ["my-id_1.2:3"]


def test_a_body_above_the_limit_is_refused_by_its_length(api: httpx.Client) -> None:
    answer = api.post("/v1/completions", json={**BODY, "prompt": "x" * 20_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, 413)


def test_a_chunked_body_is_refused_while_it_comes(strict: str) -> None:
    connection = HTTPConnection(urlsplit(strict).netloc, timeout=30)
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 50_000_000:
            sent += 5_000
            yield b"x" * 5_000

    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", body=endless(), headers=headers, encode_chunked=True)
    except (BrokenPipeError, ConnectionResetError):
        assert sent < 50_000_000
        return
    assert connection.getresponse().status == 413


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 4), ("n", 0), ("n", True), ("n", 10**30), ("best_of", 9), ("stop", ["a", "b", "c"]),
        ("stop", ["x" * 300]), ("prompt", ["x"] * 129), ("prompt", [1, "x"]),
        ("stop_token_ids", [512]), ("stop_token_ids", [-1]),
        ("allowed_token_ids", [10**9]), ("logit_bias", {"100000": 1}), ("logprobs", 1000), ("temperature", -1),
        ("top_p", 2), ("max_tokens", 0), ("max_tokens", "many"), ("chat_template", "{{ 1 }}"),
        ("kv_transfer_params", {"a": 1}), ("use_beam_search", True), ("prompt_embeds", "AAAA"), ("stream", "perhaps"),
        ("response_format", "json"), ("structured_outputs", {"regex": "a{1,100000}"}), ("user", "u" * 200),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(api: httpx.Client, field: str, value: object) -> None:
    answer = api.post("/v1/completions", json={**BODY, field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert value == 10**30 or (error["param"] or "").split(".")[0] == field, error


def test_overload_is_429_with_retry_after_and_passes(strict: str) -> None:
    async def fill() -> list[int]:
        async with httpx.AsyncClient(
            base_url=strict, headers={"Authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False
        ) as client:

            async def one() -> int:
                async with client.stream("POST", "/v1/completions", json=LONG) as answer:
                    if answer.status_code != 200:
                        assert 1 <= int(answer.headers["retry-after"]) <= 60
                        assert answer.headers["content-type"] == "application/json"
                        await answer.aread()
                        assert answer.json()["error"]["code"] == 429
                        return answer.status_code
                    async for _ in answer.aiter_bytes():
                        if all_answered.is_set():
                            break
                    return 200

            all_answered = asyncio.Event()
            tasks = [asyncio.create_task(one()) for _ in range(30)]
            while sum(task.done() for task in tasks) < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            all_answered.set()
            return await asyncio.gather(*tasks)

    statuses = asyncio.run(fill())
    assert statuses.count(429) == 10, "16 slots and 4 that wait: 20 of 30 are taken"
    assert statuses.count(200) == 20
    with openai.OpenAI(base_url=f"{strict}/v1", api_key=KEY, max_retries=5, timeout=60) as client:
        assert client.completions.create(**BODY).choices[0].finish_reason == "length"


def test_not_ready_says_why_and_live_is_live(instances: list[InstanceProcess]) -> None:
    routes = FixedRoutes()
    with serving(ingress_config(instances), routes) as url, httpx.Client(base_url=url, trust_env=False) as client:
        answer = client.get("/ready")
        assert (answer.status_code, answer.json()["ready"]) == (503, False)
        assert answer.json()["why"]
        assert client.get("/live").status_code == 200
        for asked in (client.get("/health"), client.get("/ping"), client.post("/ping")):
            assert asked.status_code == asked.json()["error"]["code"] == 503
            assert answer.json()["why"] in asked.json()["error"]["message"]
        routes.show(instances)
        wait_ready(url)


def test_draining_refuses_the_new_and_finishes_the_old(instances: list[InstanceProcess]) -> None:
    with serving(ingress_config(instances), FixedRoutes(instances)) as url:
        wait_ready(url)
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            started, texts = threading.Event(), []

            def long_one() -> None:
                with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 200}) as answer:
                    for line in answer.iter_lines():
                        started.set()
                        texts.append(line)

            thread = threading.Thread(target=long_one)
            thread.start()
            assert started.wait(30)
            assert client.post("/cluster/drain", json={"timeout_s": 1}).json() == {"drained": True}
            assert client.get("/ready").json() == {"ready": False, "why": "draining"}
            assert client.get("/health").status_code == 503
            refused = client.post("/v1/completions", json=BODY)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            thread.join(30)
            assert "data: [DONE]" in texts
            assert client.post("/cluster/drain", json={"timeout_s": "long"}).json()["error"]["param"] == "timeout_s"


def test_a_drain_that_another_ingress_was_asked_for_is_heard_of(instances: list[InstanceProcess]) -> None:
    routes = FixedRoutes(instances)
    with serving(ingress_config(instances), routes) as url, httpx.Client(base_url=url, trust_env=False) as client:
        wait_ready(url)
        routes.show([], is_draining=True)
        deadline_s = time.monotonic() + 80
        while client.get("/ready").json()["why"] != "draining":
            assert time.monotonic() < deadline_s
        assert client.post("/v1/completions", json=BODY).status_code == 503


@pytest.mark.parametrize("prompt", ["hello", ["hello", "world"], [[5, 6], [7], [8]]], ids=["one", "texts", "ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_as_a_whole(
    instances: list[InstanceProcess], prompt: object, stream: bool
) -> None:
    config = ingress_config(instances, limits=LimitConfig(request_timeout_s=0.2))
    with serving(config, FixedRoutes(instances)) as url, httpx.Client(base_url=url, trust_env=False) as client:
        wait_ready(url)
        body = {**BODY, "prompt": prompt, "max_tokens": 900, "ignore_eos": True, "stream": stream}
        answer = client.post("/v1/completions", json=body, timeout=120)
        assert "longer than this server allows" in answer.text
        assert answer.status_code == (200 if stream else 503)
        assert '"code":503' in answer.text.replace(" ", "")
