"""One running application for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.application import Application


@pytest.fixture(scope="session")
def application(model: Path) -> Iterator[Application]:
    """Two instances behind HTTP. Tests leave both ready."""
    running = Application(model)
    try:
        running.wait_ready()
        yield running
    finally:
        exit_code = running.stop()
    assert exit_code == 0, "Ctrl-C did not stop the application cleanly"


@pytest.fixture
def http(application: Application) -> Iterator[httpx.Client]:
    """A plain client of the application."""
    with httpx.Client(base_url=application.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def client(application: Application) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=f"{application.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
