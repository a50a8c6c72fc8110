"""Laws through HAProxy, Serve and a replica: a request ends with its client, and no client steers Ray Serve."""

import json

import httpx
import pytest

from tests.support.application import Application
from tests.support.leaving import EVERY_ROUTE, WHOLE, check_leaving

pytestmark = pytest.mark.slow

STRANGE = [b"\xff\xfe", "ünique".encode(), b"a b", b"a\tb", b"x" * 3000, b"?1", b"0.05"]
READ_BY_SERVE = [
    "x-request-id",
    "x-request-timeout-seconds",
    "x-request-disconnect-disabled",
    "serve_multiplexed_model_id",
    "serve-multiplexed-model-id",
    "x-session-id",
    "traceparent",
]


@pytest.mark.parametrize("name", EVERY_ROUTE)
def test_a_request_ends_with_its_client(application: Application, name: str) -> None:
    application.wait_ready()
    check_leaving(application.url, EVERY_ROUTE[name])
    assert "was destroyed but it is pending" not in application.ingress_log()


def test_no_client_makes_its_request_unstoppable(application: Application) -> None:
    check_leaving(application.url, WHOLE["completion"], {"x-request-disconnect-disabled": "?1"})


def test_no_client_cuts_its_stream_off(application: Application) -> None:
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 300, "ignore_eos": True, "stream": True}
    headers = {"x-request-timeout-seconds": "0.05"}
    with httpx.stream("POST", f"{application.url}/v1/completions", json=body, headers=headers, timeout=120) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", READ_BY_SERVE)
@pytest.mark.parametrize("value", STRANGE, ids=lambda value: repr(value)[:12])
def test_no_header_breaks_an_answer(application: Application, name: str, value: bytes) -> None:
    for path, status in (("/v1/models", 200), ("/nowhere", 404)):
        answer = httpx.get(f"{application.url}{path}", headers=[(name.encode(), value)], timeout=60)
        assert answer.status_code == status, answer.text
        assert status == 200 or answer.json()["error"]["code"] == status
        assert len(answer.headers.get_list("x-request-id")) == 1


def test_a_sane_request_id_comes_back_once(application: Application) -> None:
    answer = httpx.get(f"{application.url}/health", headers={"x-request-id": "my-id_1.2:3"}, timeout=60)
    assert answer.headers.get_list("x-request-id") == ["my-id_1.2:3"]
