"""Laws of the guard that need no engine: other origins, request ids, slashes. It stands around a small application."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pengserve.cluster.ingress.config import IngressConfig
from pengserve.cluster.ingress.guard import Guard
from pengserve.cluster.ingress.traffic import Traffic
from pengserve.planners.types.config import InstanceConfig

PAGE = "https://chat.example.org"
KEY = "key-of-the-tests"


def client(*, allowed_origins: Sequence[str] = (), **config: Any) -> httpx.AsyncClient:
    """A client of a guarded application that has `/v1/models` and `/cluster/status`."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)

    @app.get("/v1/models")
    @app.get("/cluster/status")
    async def answer() -> dict[str, bool]:
        return {"ok": True}

    instance = InstanceConfig(app="tests", model="none")
    guard = Guard(
        app,
        config=IngressConfig(
            instance=instance, num_instances=1, api_keys=(KEY,), allowed_origins=tuple(allowed_origins), **config
        ),
        traffic=Traffic(max_queued=1, num_ingresses=1, num_slots=lambda: 1),
        vocab_size=10,
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=guard), base_url="http://tests")


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
        answer = await http.get("/cluster/status", headers={"Origin": PAGE})
        assert answer.status_code == 200
        assert not any(name.startswith("access-control-") for name in answer.headers)


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
