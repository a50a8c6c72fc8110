"""Law: when its client has left, no sequence of a request goes on, on any route, whole or streamed."""

import gc
from collections.abc import Iterator

import httpx
import pytest

from tests.support.ingress import FixedRoutes, ingress_config, serving, wait_ready
from tests.support.leaving import EVERY_ROUTE, STREAMED, WHOLE, check_leaving
from tests.support.processes import InstanceProcess
from tests.support.serve_like import STUCK_HEADER, ServeLike

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_is_collected() -> Iterator[None]:
    """What a client left behind must end at once, and not with the next garbage collection."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture(scope="module")
def in_serve(instances: list[InstanceProcess]) -> Iterator[str]:
    """An ingress that is cancelled when clients leave, as Ray Serve does it."""
    with serving(ingress_config(instances), FixedRoutes(instances), ServeLike) as url:
        wait_ready(url)
        yield url


@pytest.mark.parametrize("name", EVERY_ROUTE)
def test_uvicorn_tells_that_the_client_left(ingress: str, name: str) -> None:
    check_leaving(ingress, EVERY_ROUTE[name])


@pytest.mark.parametrize("name", EVERY_ROUTE)
def test_serve_cancels_when_the_client_left(in_serve: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    check_leaving(in_serve, EVERY_ROUTE[name])
    gc.collect()
    assert "was destroyed but it is pending" not in caplog.text


# The first event of a streamed response comes before anything is asked of an instance.
@pytest.mark.parametrize("name", [name for name in STREAMED if name != "responses-stream"])
def test_a_stream_that_waits_for_its_client_ends_with_it(in_serve: str, name: str) -> None:
    check_leaving(in_serve, STREAMED[name], {STUCK_HEADER: "1"})


def test_no_response_is_made_without_a_client(ingress: str) -> None:
    body = {**WHOLE["responses"].body, "background": True, "store": True}
    answer = httpx.post(f"{ingress}/v1/responses", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "background"
