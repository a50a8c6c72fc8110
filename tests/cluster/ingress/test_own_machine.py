"""Without an admin key the cluster's routes answer to programs of this machine, and to nothing that acts through it."""

import pytest
from starlette.datastructures import Headers

from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.cluster.ingress.guards.own_machine import refuse_foreign

JSON = {"content-type": "application/json"}


def status(method: str = "GET", **headers: str) -> int:
    """What `refuse_foreign` answers; 200 where it lets the request through."""
    given = {"host": "127.0.0.1:8000"} | {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        refuse_foreign(method, Headers(given))
    except RequestRefused as refused:
        assert "security.admin_key" in refused.message or refused.status == 415
        return refused.status
    return 200


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "127.0.0.1", "localhost:8000", "[::1]:8000", "127.9.9.9"])
def test_this_machine_may_steer(host: str) -> None:
    assert status(host=host) == 200
    assert status("PUT", host=host, content_type="application/json; charset=utf-8") == 200


@pytest.mark.parametrize(
    "host", ["evil.example.org", "10.0.0.1:8000", "localhost.example.org", "", "[", "127.0.0.1.nip.io"]
)
def test_a_name_that_was_pointed_here_may_not(host: str) -> None:
    assert status(host=host) == 403


@pytest.mark.parametrize(
    "name", ["Forwarded", "Via", "X-Real-IP", "X-Forwarded-For", "X-Forwarded-Host", "x-forwarded-x"]
)
def test_what_a_proxy_forwards_may_not(name: str) -> None:
    assert status(**{name: "for=10.0.0.7"}) == 403


@pytest.mark.parametrize(
    "origin", ["https://evil.example.org", "http://localhost:3000", "null", "", "http://127.0.0.1"]
)
def test_a_web_page_may_not(origin: str) -> None:
    assert status(origin=origin) == 403
    assert status("PUT", origin=origin, content_type="application/json") == 403


@pytest.mark.parametrize(
    ("site", "expected"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_a_browser_says_where_its_request_comes_from(site: str, expected: int) -> None:
    assert status(sec_fetch_site=site) == expected


def test_a_page_of_the_server_itself_may() -> None:
    assert status(origin="http://127.0.0.1:8000", sec_fetch_site="same-origin") == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_a_form_may_not(method: str, kind: str) -> None:
    assert status(method, content_type=kind) == 415
    assert status(method) == 415
