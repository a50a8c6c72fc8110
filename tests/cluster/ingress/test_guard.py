"""Laws of the guard that need no engine: other origins, request ids, slashes. It stands around a small application."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pengserve.cluster.ingress.config import IngressConfig
from pengserve.cluster.ingress.guards.guard import Guard
from pengserve.cluster.ingress.in_flight.traffic import Traffic
from pengserve.planners.types.config import InstanceConfig

PAGE = "https://chat.example.org"
KEY, ADMIN_KEY, METRICS_KEY = "key-of-the-tests", "admin-key-of-the-tests", "metrics-key-of-the-tests"


def client(*, allowed_origins: Sequence[str] = (), url: str = "http://tests", **config: Any) -> httpx.AsyncClient:
    """A client of a guarded application with API keys that has `/v1/models`, `/metrics` and routes of the cluster."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)

    @app.get("/v1/models")
    @app.get("/cluster/status")
    @app.put("/cluster/layout")
    @app.get("/metrics")
    async def answer() -> dict[str, bool]:
        return {"ok": True}

    config = {"api_keys": (KEY,), "admin_key": ADMIN_KEY, "allowed_origins": tuple(allowed_origins)} | config

    instance = InstanceConfig(app="tests", model="none")
    guard = Guard(
        app,
        config=IngressConfig(instance=instance, num_instances=1, **config),
        traffic=Traffic(max_queued=1, num_ingresses=1, num_slots=lambda: 1),
        vocab_size=10,
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=guard), base_url=url)


def preflight(origin: str) -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }


@pytest.mark.parametrize("allowed", [[PAGE], ["http://localhost:3000", PAGE], ["*"]])
async def test_a_page_of_an_allowed_origin_may_ask(allowed: list[str]) -> None:
    async with client(allowed_origins=allowed) as http:
        asked = await http.options("/v1/chat/completions", headers=preflight(PAGE))
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == ("*" if "*" in allowed else PAGE)
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        assert len(asked.headers.get_list("x-request-id")) == 1
        refused = await http.get("/v1/models", headers={"Origin": PAGE})
        good = await http.get("/v1/models", headers={"Origin": PAGE, "Authorization": f"Bearer {KEY}"})
        assert (refused.status_code, good.status_code) == (401, 200)
        for answer in (refused, good):  # a page can read the error too
            assert answer.headers["access-control-allow-origin"] == ("*" if "*" in allowed else PAGE)
            assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


@pytest.mark.parametrize("origin", ["https://other.example.org", PAGE + ":8443", "http://chat.example.org", "null", ""])
@pytest.mark.parametrize("allowed", [[], [PAGE]])
async def test_a_page_of_another_origin_may_not(allowed: list[str], origin: str) -> None:
    async with client(allowed_origins=allowed) as http:
        asked = await http.options("/v1/models", headers=preflight(origin))
        assert (asked.status_code, asked.json()["error"]["code"]) == (401, 401)
        answer = await http.get("/v1/models", headers={"Origin": origin, "Authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200
        assert not any(name.startswith("access-control-") for name in (*asked.headers, *answer.headers))


async def test_no_page_may_steer_the_cluster() -> None:
    async with client(allowed_origins=["*"]) as http:
        answer = await http.get("/cluster/status", headers={"Origin": PAGE, "x-pengserve-admin-key": ADMIN_KEY})
        assert answer.status_code == 200
        assert not any(name.startswith("access-control-") for name in answer.headers)
    async with client(allowed_origins=["*"], api_keys=(), admin_key="", url="http://127.0.0.1:8000") as http:
        assert (await http.get("/cluster/status")).status_code == 200
        answer = await http.get("/cluster/status", headers={"Origin": PAGE})
        assert answer.status_code == 403
        assert not any(name.startswith("access-control-") for name in answer.headers)


async def test_an_api_key_changes_no_layout() -> None:
    """Also where the cluster's routes have no key of their own."""
    for admin_key, expected in ((ADMIN_KEY, 401), ("", 403)):
        async with client(admin_key=admin_key, url="http://127.0.0.1:8000") as http:
            for method, path in (("PUT", "/cluster/layout"), ("GET", "/cluster/status")):
                answer = await http.request(method, path, json={}, headers={"Authorization": f"Bearer {KEY}"})
                assert answer.status_code == expected


async def test_metrics_are_open_where_no_key_is_set_and_closed_to_strangers_where_one_is() -> None:
    async with client(api_keys=(), admin_key="", url="http://127.0.0.1:8000") as http:
        assert (await http.get("/metrics")).status_code == 200
    for keys in ({"metrics_key": METRICS_KEY}, {"metrics_key": METRICS_KEY, "admin_key": "", "api_keys": ()}):
        async with client(**keys) as http:
            for key, expected in ((None, 401), (KEY, 401), ("x", 401), (METRICS_KEY, 200)):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                assert (await http.get("/metrics", headers=headers)).status_code == expected
    async with client() as http:
        assert (await http.get("/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"})).status_code == 200
        assert (await http.get("/metrics")).status_code == 401


async def test_a_cluster_without_an_admin_key_takes_json_alone() -> None:
    async with client(api_keys=(), admin_key="", url="http://localhost:8000") as http:
        form = await http.put("/cluster/layout", content=b'{"layout": "dp"}', headers={"Content-Type": "text/plain"})
        assert (form.status_code, form.json()["error"]["type"]) == (415, "UnsupportedMediaTypeError")
        assert (await http.put("/cluster/layout", json={"layout": "dp"})).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models"])
async def test_a_slash_at_the_end_changes_neither_route_nor_key(path: str) -> None:
    async with client() as http:
        assert (await http.get(path)).status_code == 401
        assert (await http.get(path, headers={"Authorization": f"Bearer {KEY}"})).json() == {"ok": True}


@pytest.mark.parametrize(
    "given", [b"", b"a b", b"a\tb", b"\xff\xfe", "ünique".encode(), b"x" * 129, b"x" * 5000, b'"><script>', b"-a"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/nowhere", "/v1/completions"])
async def test_a_strange_request_id_is_replaced_by_one(path: str, given: bytes) -> None:
    async with client() as http:
        answer = await http.get(path, headers=[(b"x-request-id", given), (b"authorization", f"Bearer {KEY}".encode())])
        (request_id,) = answer.headers.get_list("x-request-id")
        assert request_id.encode() != given
        assert request_id.isalnum()
