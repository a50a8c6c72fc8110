"""The controller hears what requests want: soon, not too often, and not at all while there is nothing to say."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pengserve.cluster.ingress import demand as demand_module
from pengserve.cluster.ingress.demand import NOTHING, DemandReporter
from pengserve.cluster.ingress.request.request_options import RequestOptions
from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.snapshot import Demand
from tests.support.moving import Cluster

WISH = RequestOptions(degree=2)
WANTED = Demand(num_waiting=1, longest_waiting_tokens=10, wanted_degrees=((2, 1),))  # 3 of prompt, and no route at all


class Controller:
    """Takes reports, or fails."""

    def __init__(self) -> None:
        self.reports: list[Demand] = []
        self.is_away = False
        self.heard = asyncio.Event()

    async def report_demand(self, client_id: str, demand: Demand) -> None:
        assert client_id == "me"
        self.heard.set()
        if self.is_away:
            raise EngineError("away")
        self.reports.append(demand)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PERIOD_S": 0.01, "REPEAT_S": 0.1, "PAUSE_S": 0.01}.items():
        monkeypatch.setattr(demand_module, name, value)


@asynccontextmanager
async def reporting(cluster: Cluster, controller: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(DemandReporter(cluster.book, controller, "me").run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_change_is_told_once_and_the_end_as_well() -> None:
    cluster, controller = Cluster(1), Controller()
    async with reporting(cluster, controller):
        cluster.request(1, 5, WISH, max_tokens=7)
        await asyncio.sleep(0.05)
        assert controller.reports == [WANTED]
        cluster.abort(1)
        await asyncio.sleep(0.05)
        assert controller.reports == [WANTED, NOTHING]
        assert not cluster.book.used.is_set(), "it sleeps"
        cluster.request(2, 5, WISH, max_tokens=7)
        await asyncio.sleep(0.05)
        assert controller.reports == [WANTED, NOTHING, WANTED]


async def test_what_stays_is_repeated_and_nothing_is_not() -> None:
    cluster, controller = Cluster(1), Controller()
    async with reporting(cluster, controller):
        await asyncio.sleep(0.05)
        assert controller.reports == []
        cluster.request(1, 5, WISH, max_tokens=7)
        await asyncio.sleep(0.35)
        assert 2 <= len(controller.reports) <= 4
        assert set(controller.reports) == {WANTED}


async def test_what_did_not_arrive_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "REPEAT_S", 60.0)  # not because it stays
    cluster, controller = Cluster(1), Controller()
    controller.is_away = True
    async with reporting(cluster, controller):
        cluster.request(1, 5, WISH, max_tokens=7)
        await controller.heard.wait()
        controller.is_away = False
        controller.heard.clear()
        await controller.heard.wait()
        assert controller.reports[0] == WANTED
