"""One tp group becomes dp groups: each request goes, with its KV, where most blocks are free."""

import asyncio

from pengserve.planners.taking_part import require_leaving
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.strategy import SwitchStrategy
from pengserve.planners.types.units import blocks_for
from pengserve.planners.waves import split_wave
from pengserve.simulator.engine.group import SimGroup, SimTraveller, end_group
from pengserve.simulator.engine.instance import SimInstance
from pengserve.simulator.engine.switches.draining import drain
from pengserve.simulator.engine.switches.merge import note_stall
from pengserve.simulator.engine.switches.switch import SimSwitch, by_head
from pengserve.simulator.requests import LiveRequest


def check_split(plan: SwitchPlan, member: SimInstance) -> None:
    """Raise StepError where this member cannot take part in a split or restore now."""
    run, leads = member.group, member.group is not None and member.group.leader is member
    requests = [r.arrival for r in run.requests()] if run is not None and leads else []
    narrowest = min(plan.parts, key=lambda part: part.degree)
    require_leaving(
        plan,
        member.key,
        "dp" if run is None else str(run.group),
        is_waiting=run is not None and leads and run.is_exchanging,
        requests=((r.request_id, r.prompt_tokens + r.output_tokens) for r in requests),
        limit=lambda: member.sizes.lane(narrowest.shape).max_model_len,
    )


async def split(switch: SimSwitch) -> SwitchReport:
    """Carries out a split. Until the lane has stopped it may be called off."""
    loop, plan, run = asyncio.get_running_loop(), switch.plan, switch.leader.group
    assert run is not None
    _, drain_s = await drain(switch)
    check_split(plan, switch.leader)
    meet_s = await switch.meet()
    started_s = loop.time()
    going = list(run.lane.scheduler.running) if plan.strategy is not SwitchStrategy.SOFT else []
    carried = await _hand_on(switch, run, going)
    await asyncio.sleep(switch.around.costs.cutover_s)
    num_running = len(run.lane.scheduler.running)
    rest = end_group(run)
    switch.leave_group()
    switch.around.owner.moved(rest, None, carried=False)
    note_stall(carried, loop.time() - started_s)
    return SwitchReport(
        plan_id=plan.plan_id,
        epoch=switch.epoch,
        drain_s=drain_s,
        meet_s=meet_s,
        cutover_s=loop.time() - started_s,
        num_carried=len(carried),
        num_recomputed=num_running,
        num_redirected=len(rest) - num_running,
        carried_bytes=switch.sent_bytes,
    )


async def _hand_on(switch: SimSwitch, run: SimGroup, going: list[LiveRequest]) -> list[LiveRequest]:
    """Moves what finds room, a wave at a time; the requests that were carried."""
    scheduler, carried = run.lane.scheduler, []
    while going:
        num_used = scheduler.num_blocks - scheduler.num_free  # each takes a dp block of every member
        free = [member.lane.scheduler.num_free - num_used for member in switch.members]
        wave, going = _next_wave(switch, run, going, free)
        if not wave:
            break
        await switch.send(by_head(wave, switch.parts, switch.token_bytes, is_merge=False))
        for traveller in wave:
            member = switch.members[traveller.rank]
            run.lane.remove([traveller.request])
            has_room = member.lane.admit(traveller.request, traveller.num_tokens)
            assert has_room, "its blocks were counted"
            switch.around.owner.moved([traveller.request], member.key, carried=True)
            carried.append(traveller.request)
    return carried


def _next_wave(
    switch: SimSwitch, run: SimGroup, going: list[LiveRequest], free: list[int]
) -> tuple[list[SimTraveller], list[LiveRequest]]:
    found = [(request, run.lane.scheduler.computed_tokens(request)) for request in going]
    leaving = [(request, tokens) for request, tokens in found if tokens]  # the others are sent again
    block_size = switch.leader.sizes.dp.block_size
    ranks = split_wave([(tokens, blocks_for(tokens + 1, block_size)) for _, tokens in leaving], free)
    wave: list[SimTraveller] = []
    left: list[LiveRequest] = []
    for (request, tokens), rank in zip(leaving, ranks, strict=True):
        if rank is None:
            left.append(request)
        else:
            wave.append(SimTraveller(request, rank, tokens))
    return wave, left
