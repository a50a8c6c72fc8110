"""One pipeline ends in instances alone, or narrower ones (KunServe 4.4): weights come beside serving, then KV."""

import asyncio
from itertools import permutations

from pengserve.planners.stages import Parts
from pengserve.planners.types.errors import StepError
from pengserve.planners.types.plans import SwitchReport
from pengserve.planners.types.units import blocks_for
from pengserve.planners.waves import place
from pengserve.simulator.engine.group import SimGroup, SimTraveller, end_group
from pengserve.simulator.engine.switches.merge import note_stall
from pengserve.simulator.engine.switches.split import check_split
from pengserve.simulator.engine.switches.switch import SimSwitch, by_layer, shared_layers


async def restore(switch: SimSwitch) -> SwitchReport:
    """Carries out a restore. Until all weights are back it may be called off."""
    loop, plan, run = asyncio.get_running_loop(), switch.plan, switch.leader.group
    assert run is not None
    started_s = loop.time()
    parts = switch.parts
    await _bring_weights(switch, run, parts)
    weights_s = loop.time() - started_s
    try:
        check_split(plan, switch.leader)
    except StepError:
        run.lane.resize(run.capacity.num_blocks)
        raise
    meet_s = await switch.meet()
    started_s = loop.time()
    wave = _assign(switch, run)
    num_recomputed = len(run.lane.scheduler.running) - len(wave)
    sent_before = switch.sent_bytes
    await switch.send(by_layer(wave, parts, switch.token_bytes, is_drop=False))
    await asyncio.sleep(switch.remap_s + switch.around.costs.cutover_s)
    narrower = {part: await switch.begin_group(part) for part in plan.parts if part.degree > 1}
    for traveller in wave:
        member = switch.members[traveller.rank]
        part_run = narrower.get(plan.parts[parts.of(traveller.rank)])
        run.lane.remove([traveller.request])
        has_room = (member if part_run is None else part_run).lane.admit(traveller.request, traveller.num_tokens)
        assert has_room, "its blocks were counted"
        switch.around.owner.moved([traveller.request], member.key, carried=True)
    rest = end_group(run)
    for part_run in narrower.values():
        switch.enter_group(part_run)
    switch.leave_group()
    switch.around.owner.moved(rest, None, carried=False)
    note_stall([traveller.request for traveller in wave], loop.time() - started_s)
    return SwitchReport(
        plan_id=plan.plan_id,
        epoch=switch.epoch,
        drain_s=weights_s,
        meet_s=meet_s,
        cutover_s=loop.time() - started_s,
        num_carried=len(wave),
        num_recomputed=num_recomputed,
        num_redirected=len(rest) - num_recomputed,
        carried_bytes=switch.sent_bytes - sent_before,
    )


async def _bring_weights(switch: SimSwitch, run: SimGroup, parts: Parts) -> None:
    """Every member gets the layers that it misses in its part, from the one that has kept them.

    Raises:
        StepError: too many blocks are in use to make room, or it took longer than the plan allows.
    """
    scheduler, sizes = run.lane.scheduler, switch.leader.sizes
    num_left = sizes.layers.num_blocks_left(parts)
    if not run.lane.resize(min(num_left, scheduler.num_blocks)):
        num_used = scheduler.num_blocks - scheduler.num_free
        raise StepError(f"{num_left} blocks are left while weights come back, and {num_used} are in use")
    pairs = {
        (source, target): shared_layers(parts, target, source) * sizes.layer_bytes
        for source, target in permutations(range(len(switch.members)), 2)
    }
    try:
        async with asyncio.timeout(switch.plan.drain_timeout_s):
            await switch.send(pairs, is_weights=True)
    except BaseException as error:
        run.lane.resize(run.capacity.num_blocks)
        if isinstance(error, TimeoutError):
            raise StepError(f"the weights were not back within {switch.plan.drain_timeout_s:g} s") from None
        raise


def _assign(switch: SimSwitch, run: SimGroup) -> list[SimTraveller]:
    """Each request goes where most blocks are left; what fits nowhere is resumed from its tokens."""
    sizes, scheduler, parts = switch.leader.sizes, run.lane.scheduler, switch.parts
    free = [sizes.lane(part.shape).num_blocks for part in switch.plan.parts]
    found = [(request, scheduler.computed_tokens(request)) for request in scheduler.running]
    leaving = [(request, tokens) for request, tokens in found if tokens]  # the others are sent again
    places = place([(tokens, blocks_for(tokens + 1, sizes.dp.block_size)) for _, tokens in leaving], free)
    return [
        SimTraveller(request, parts.start(part), tokens)
        for (request, tokens), part in zip(leaving, places, strict=True)
        if part is not None
    ]
