"""Shares over a real instance: a tenant that floods it does not delay another one's request."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pengserve.cluster.ingress.config import IngressConfig
from pengserve.planners.types.tenants import FairnessConfig
from tests.support.ingress import MODEL_NAME, FixedRoutes, ingress_config, serving, wait_ready
from tests.support.processes import InstanceProcess, start_instances

pytestmark = pytest.mark.slow

NUM_FLOOD, SLOTS, NUM_GUESTS = 60, 4, 3


@pytest.fixture(scope="module")
def narrow(model: Path) -> Iterator[InstanceProcess]:
    """An instance with few places, whose scheduler goes by priority."""
    [process] = start_instances(model, [0], engine={"max_num_seqs": SLOTS, "scheduling_policy": "priority"})
    yield process
    assert process.stop() == 0


def config(process: InstanceProcess, *, is_fair: bool) -> IngressConfig:
    return ingress_config([process], is_tenant_trusted=True, fairness=FairnessConfig(is_on=is_fair))


async def ask(http: httpx.AsyncClient, tenant: str, number: int) -> float:
    """Asks, and says when the answer was whole."""
    body = {"model": MODEL_NAME, "prompt": [5 + number] * 40, "max_tokens": 12, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body, headers={"x-pengserve-tenant": tenant})
    answer.raise_for_status()
    return time.monotonic()


async def flood_and_guests(url: str) -> tuple[list[float], list[float]]:
    """When the answers of a flood, and of a few requests behind it, were whole."""
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
        flood = [asyncio.create_task(ask(http, "flood", number)) for number in range(NUM_FLOOD)]
        await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        guests = [asyncio.create_task(ask(http, "guest", 200 + number)) for number in range(NUM_GUESTS)]
        return await asyncio.gather(*flood), await asyncio.gather(*guests)


@pytest.mark.parametrize("is_fair", [True, False])
def test_a_guest_is_served_before_what_a_flood_has_queued(narrow: InstanceProcess, is_fair: bool) -> None:
    with serving(config(narrow, is_fair=is_fair), FixedRoutes([narrow])) as url:
        wait_ready(url)
        flood, guests = asyncio.run(flood_and_guests(url))
    num_before = sum(ended_s < max(guests) for ended_s in flood)
    if is_fair:
        assert num_before <= 6 * SLOTS, "those that ran, and a few that took turns with the guests"
    else:
        assert num_before >= NUM_FLOOD - SLOTS, "in the order of arrival"
