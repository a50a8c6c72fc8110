"""Waiting for running requests to end before a switch (Flying Serving sections 5.2.1 and 5.2.2)."""

import asyncio

from pengserve.planners.types.strategy import SwitchStrategy
from pengserve.simulator.engine.instance import SimInstance
from pengserve.simulator.engine.switches.switch import SimSwitch
from pengserve.simulator.requests import LiveRequest


async def drain(switch: SimSwitch) -> tuple[frozenset[LiveRequest] | None, float]:
    """Waits until what runs has ended, `drain_timeout_s` at most; new requests wait.

    Under soft, a member that has drained runs new ones meanwhile.

    Returns:
        The requests that ran when it began, of which those that are left are carried; None where nothing drains.
        And the seconds that it took.
    """
    if not switch.plan.drains:
        return None, 0.0
    loop, plan = asyncio.get_running_loop(), switch.plan
    started_s = loop.time()
    members = [member for member in switch.members if not member.is_follower]
    running = [list(member.current.scheduler.running) for member in members]

    async def wait(member: SimInstance, requests: list[LiveRequest]) -> None:
        await member.drained(requests)
        if plan.strategy is SwitchStrategy.SOFT:
            member.release_new()

    for member in members:
        member.hold_new()
    try:
        async with asyncio.timeout(plan.drain_timeout_s), asyncio.TaskGroup() as group:
            for member, requests in zip(members, running, strict=True):
                group.create_task(wait(member, requests))
    except TimeoutError:
        pass  # what has not finished is carried
    return frozenset(request for requests in running for request in requests), loop.time() - started_s
