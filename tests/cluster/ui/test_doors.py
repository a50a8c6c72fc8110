"""Nothing of the cluster without the key: page, stream, steering, and what their errors say."""

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from pengserve.cluster.ui.routes import ASSETS
from tests.support.simulated import SimulatedCluster, application, served

ADMIN_KEY, API_KEY = "the-admin-key-of-the-tests", "an-api-key-of-the-tests"
DATA = ("simulated", "instances", "weights", "tp2")
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def cluster() -> SimulatedCluster:
    """Two instances in a group."""
    return SimulatedCluster(2, groups="tp2@(0,1)")


@pytest.fixture(scope="module")
def closed(cluster: SimulatedCluster) -> Iterator[str]:
    """URL of an application with keys."""
    with served(application(cluster, admin_key=ADMIN_KEY, api_keys=(API_KEY,))) as url:
        yield url


@pytest.fixture(scope="module")
def open_to_this_machine(cluster: SimulatedCluster) -> Iterator[str]:
    """URL of an application without keys, on loopback."""
    with served(application(cluster)) as url:
        yield url


def http(url: str, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers=headers, timeout=10, trust_env=False)


def first_event(client: httpx.Client, headers: Mapping[str, str] | None = None) -> tuple[httpx.Response, str]:
    """The head of the stream's answer, and its first event."""
    with client.stream("GET", "/cluster/stream", headers=headers) as answer:
        text = ""
        for piece in answer.iter_text():
            text += piece
            if "event:" in text and text.endswith("\n\n"):
                break
        return answer, text


def sign_in(client: httpx.Client, key: str = ADMIN_KEY) -> httpx.Response:
    return client.post("/ui/login", data={"key": key})


@pytest.mark.parametrize("headers", [{}, {"Authorization": f"Bearer {API_KEY}"}, {"x-pengserve-admin-key": "x"}])
@pytest.mark.parametrize("path", ["/ui", "/ui/", "/cluster/stream", "/cluster/status", "/cluster/stream/"])
def test_a_stranger_sees_nothing(closed: str, path: str, headers: dict[str, str]) -> None:
    with http(closed, **headers, **{"Last-Event-ID": "x-1"}) as client:
        answer = client.get(path)
        assert answer.status_code == 401
        assert not any(word in answer.text for word in DATA), answer.text


@pytest.mark.parametrize("name", ["pengserve_00000000=1.2.3", "x=y", "=", "a" * 5000])
def test_a_made_up_cookie_opens_nothing(closed: str, name: str) -> None:
    with http(closed, Cookie=name) as client:
        for path in ("/ui", "/cluster/stream"):
            assert client.get(path).status_code == 401


def test_the_files_hold_no_data_and_are_open(closed: str) -> None:
    with http(closed) as client:
        for name in ASSETS:
            answer = client.get(f"/ui/{name}")
            assert answer.status_code == 200 and answer.headers["etag"]
            assert client.get(f"/ui/{name}", headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
        for path in ("/ui/page.html", "/ui/login.html", "/ui/../routes.py", "/ui/uplot/LICENSE"):
            assert client.get(path).status_code == 404


def test_the_key_opens_page_and_stream(closed: str) -> None:
    with http(closed, **{"x-pengserve-admin-key": ADMIN_KEY}) as client:
        page = client.get("/ui")
        assert page.status_code == 200 and 'data-key="yes"' in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        answer, text = first_event(client)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
        assert "event: snapshot" in text and '"tp2"' in text


def test_signing_in_gives_a_cookie_that_opens_page_stream_and_layout(closed: str, cluster: SimulatedCluster) -> None:
    with http(closed) as client:
        wrong = sign_in(client, "wrong")
        assert wrong.status_code == 401 and "not the admin key" in wrong.text and "set-cookie" not in wrong.headers
        answer = sign_in(client)
        assert answer.status_code == 303 and answer.headers["location"] == "/ui"
        assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=Strict" in answer.headers["set-cookie"]
        assert client.get("/ui").status_code == 200
        assert "event: snapshot" in first_event(client)[1]
        own = {**JSON, "Origin": closed, "Sec-Fetch-Site": "same-origin"}
        assert client.put("/cluster/layout", json={"layout": "auto"}, headers=own).status_code == 200
        assert cluster.targets[-1] is None
        out = client.post("/ui/logout")
        assert "Max-Age=0" in out.headers["set-cookie"]
        client.cookies.clear()
        assert client.get("/ui").status_code == 401


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({**JSON, "Origin": "https://evil.example.org"}, 403),
        ({**JSON, "Origin": "null"}, 403),
        ({**JSON, "Sec-Fetch-Site": "cross-site"}, 403),
        ({**JSON, "Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_a_cookie_steers_nothing_for_another_page(
    closed: str, cluster: SimulatedCluster, headers: dict[str, str], expected: int
) -> None:
    asked, drained = len(cluster.targets), len(cluster.drained)
    with http(closed) as client:
        sign_in(client)
        for method, path in (("PUT", "/cluster/layout"), ("POST", "/cluster/instances/0/drain")):
            answer = client.request(method, path, content=b'{"layout": "dp"}', headers=headers)
            assert answer.status_code == expected
    assert (len(cluster.targets), len(cluster.drained)) == (asked, drained)


def test_a_page_of_another_site_neither_reads_the_stream_nor_signs_in(closed: str) -> None:
    foreign: dict[str, Any] = {"Origin": "https://evil.example.org", "Sec-Fetch-Site": "cross-site"}
    with http(closed) as client:
        sign_in(client)
        assert client.get("/cluster/stream", headers=foreign).status_code == 403
        assert client.post("/ui/login", data={"key": ADMIN_KEY}, headers=foreign).status_code == 403
        assert client.post("/ui/logout", headers=foreign).status_code == 403


def test_a_form_is_bounded(closed: str) -> None:
    with http(closed) as client:
        assert sign_in(client, "x" * 5000).status_code == 413
        many = "&".join(f"f{n}=1" for n in range(100))
        answer = client.post("/ui/login", content=many, headers={"Content-Type": "application/x-www-form-urlencoded"})
        assert answer.status_code == 400


def test_without_a_key_this_machine_alone_sees_the_page(open_to_this_machine: str) -> None:
    with http(open_to_this_machine) as client:
        page = client.get("/ui")
        assert page.status_code == 200 and 'data-key="no"' in page.text
        assert "event: snapshot" in first_event(client)[1]
        for headers in ({"Host": "evil.example.org"}, {"X-Forwarded-For": "10.0.0.7"}):
            for path in ("/ui", "/cluster/stream"):
                answer = client.get(path, headers=headers)
                assert answer.status_code == 403
                assert not any(word in answer.text for word in DATA)
        assert client.get("/cluster/stream", headers={"Origin": "https://evil.example.org"}).status_code == 403


def test_with_api_keys_and_no_admin_key_all_is_closed(cluster: SimulatedCluster) -> None:
    with served(application(cluster, api_keys=(API_KEY,))) as url, http(url) as client:
        for path in ("/ui", "/cluster/stream"):
            answer = client.get(path)
            assert answer.status_code == 403 and not any(word in answer.text for word in DATA)
        assert sign_in(client, "").status_code == 401
