"""Groups become one pipeline (KunServe sections 4.1, 4.2): memory at once, KV of what runs beside serving."""

import asyncio

from pengserve.planners.types.plans import SwitchReport
from pengserve.simulator.engine.group import SimGroup, SimTraveller
from pengserve.simulator.engine.switches.merge import settle_rest, travellers
from pengserve.simulator.engine.switches.switch import SimSwitch, by_layer


async def drop(switch: SimSwitch) -> SwitchReport:
    """Carries out a drop. New requests run from its end on; those that ran before go on when their KV has come."""
    loop, plan = asyncio.get_running_loop(), switch.plan
    meet_s = await switch.meet()
    started_s = loop.time()
    run = await switch.begin_group()
    coming = travellers(switch)
    await asyncio.sleep(switch.remap_s + switch.around.costs.cutover_s)
    num_left = _expect(switch, run, coming)
    num_reserved = run.num_reserved
    num_first = switch.leader.sizes.first_blocks(switch.parts)
    assert run.lane.resize(max(0, num_first - num_reserved)), "no request has a block of the new lane yet"
    left = switch.leave_parts()
    switch.enter_group(run)
    switch.around.owner.moved(left, switch.leader.key, carried=False)
    num_redirected = settle_rest(switch) + len(left)
    run.is_exchanging = True
    pairs = by_layer(run.arriving, switch.parts, switch.token_bytes, is_drop=True)
    run.exchange = loop.create_task(_exchange(switch, run, pairs), name=f"exchange {plan.plan_id}")
    run.exchange.add_done_callback(lambda done: done.cancelled() or done.result())  # an error ends the simulation
    return SwitchReport(
        plan_id=plan.plan_id,
        epoch=switch.epoch,
        meet_s=meet_s,
        cutover_s=loop.time() - started_s,
        num_carried=len(coming) - num_left,
        num_recomputed=num_left,
        num_redirected=num_redirected,
        carried_bytes=sum(pairs.values()),
    )


def _expect(switch: SimSwitch, run: SimGroup, coming: list[SimTraveller]) -> int:
    """Gives blocks to the requests whose KV will come; how many found none. They stay, and are sent again."""
    num_left, num_free = 0, run.capacity.num_blocks
    for traveller in coming:
        needed = run.blocks_needed(traveller.num_tokens)
        if needed > num_free:
            num_left += 1
            continue
        num_free -= needed
        run.arriving.append(traveller)
        switch.members[traveller.rank].current.remove([traveller.request])
        switch.around.owner.moved([traveller.request], switch.leader.key, carried=True)
    return num_left


async def _exchange(switch: SimSwitch, run: SimGroup, pairs: dict[tuple[int, int], int]) -> None:
    """KV goes to the members that keep its layers; then its requests go on, and all blocks have memory."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await switch.send(pairs)
    arriving, run.arriving = run.arriving, []
    assert run.lane.resize(run.capacity.num_blocks), "a pool grows"
    for traveller in arriving:
        traveller.request.stalls_s += loop.time() - started_s
        has_room = run.lane.admit(traveller.request, traveller.num_tokens)
        assert has_room, "its blocks were reserved"
    run.is_exchanging, run.exchange = False, None
    run.lane.resume()
    switch.around.owner.touched(switch.leader.key)
