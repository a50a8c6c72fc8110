"""One ingress over the session's two instances, shared by the tests of this directory."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from pengserve.cluster.ingress.config import OpenAIConfig
from tests.support.ingress import FixedRoutes, ingress_config, serving, wait_ready
from tests.support.processes import InstanceProcess


@pytest.fixture(scope="session")
def ingress(instances: list[InstanceProcess]) -> Iterator[str]:
    """URL of an ingress with a tool parser, open to loopback."""
    config = ingress_config(instances, openai=OpenAIConfig(tool_call_parser="hermes", enable_auto_tool_choice=True))
    with serving(config, FixedRoutes(instances)) as url:
        wait_ready(url)
        yield url


@pytest.fixture
def http(ingress: str) -> Iterator[httpx.Client]:
    """A plain client of the ingress."""
    with httpx.Client(base_url=ingress, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def client(ingress: str) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=f"{ingress}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
