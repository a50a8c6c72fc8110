"""The cost oracle: no hostile request holds the event loop of an ingress up, and none is the server's fault."""

import asyncio
from urllib.parse import urlsplit

import pytest

from pengserve.cluster.ingress.config import LimitConfig
from tests.support.effort import is_long
from tests.support.hostile import hostile_requests
from tests.support.hostile_sending import HostileRequest, send
from tests.support.ingress import FixedRoutes, ingress_config, serving, wait_ready
from tests.support.loop_lag import LoopLag
from tests.support.processes import InstanceProcess
from tests.support.speed import slowness

pytestmark = pytest.mark.slow

NUM_REQUESTS = 5000 if is_long() else 400
NUM_AT_ONCE = 4
SEED = 20262
MAX_LAG_S = 0.1
TIMEOUT_S = 120.0


async def test_no_hostile_request_holds_the_event_loop_up(instances: list[InstanceProcess]) -> None:
    lag = LoopLag()
    config = ingress_config(instances, limits=LimitConfig())
    slow: list[str] = []
    faults: list[str] = []
    with serving(config, FixedRoutes(instances), lag.around) as url:
        wait_ready(url)
        address = urlsplit(url)
        pending = iter(hostile_requests(SEED, NUM_REQUESTS))

        async def send_some() -> None:
            for request in pending:
                worst_s = lag.worst_s
                status = await send(address.hostname or "", address.port or 0, request, TIMEOUT_S)
                if lag.worst_s > max(worst_s, MAX_LAG_S * slowness()):
                    slow.append(f"{lag.worst_s:.3f} s, maybe by {_about(request)}")
                if status is not None and status >= 500 and status != 501:  # uvicorn's word on foreign methods
                    faults.append(f"{status} of {_about(request)}")

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_AT_ONCE):
                group.create_task(send_some())
    assert not faults, "\n".join(faults)
    assert not slow, "\n".join(slow)
    assert all(process.process.poll() is None for process in instances)


def _about(request: HostileRequest) -> str:
    return f"{request.kind}: {request.method} {request.path[:80]} {len(request.body)} bytes {request.body[:120]!r}"
