"""Two `pengserve up` on one machine, the second begun while the first serves: neither answers for the other."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.application import Application

pytestmark = [pytest.mark.slow, pytest.mark.shapes]


@pytest.fixture
def first(model: Path) -> Iterator[Application]:
    """A cluster of one instance that serves."""
    application = Application(model, num_instances=1, model_name="first")
    try:
        application.wait_ready(1)
        yield application
    finally:
        application.stop()


def test_neither_answers_for_the_other_and_one_ends_alone(first: Application, model: Path) -> None:
    second = Application(model, num_instances=1, model_name="second")
    try:
        answered = _names_until_ready(second)
        assert answered == {"second"}
        assert _names(first) == {"first"}
        assert "first" not in second.log()
    finally:
        exit_code = second.stop()
    assert exit_code == 0
    answer = httpx.post(
        f"{first.url}/v1/completions", json={"model": "first", "prompt": "one", "max_tokens": 4}, timeout=60
    )
    assert answer.status_code == 200, answer.text


def _names_until_ready(application: Application) -> set[str]:
    """All model names that the address has answered with, from the start until it is ready."""
    seen: set[str] = set()
    while application.snapshot() is None or not application.client.ready():
        assert application.process.poll() is None, application.log()[-4000:]
        seen |= _names(application)
    return seen | _names(application)


def _names(application: Application) -> set[str]:
    try:
        answer = httpx.get(f"{application.url}/v1/models", timeout=10)
    except httpx.HTTPError:
        return set()
    return {item["id"] for item in answer.json()["data"]} if answer.status_code == 200 else set()
