"""One pipeline becomes dp groups again (KunServe section 4.4): weights come back beside serving, then KV."""

import asyncio
from itertools import permutations

from pengserve.planners.types.errors import StepError
from pengserve.planners.types.plans import SwitchReport
from pengserve.planners.types.units import blocks_for
from pengserve.simulator.engine.group import GroupRun, Traveller, end_group
from pengserve.simulator.engine.switches.merge import note_stall
from pengserve.simulator.engine.switches.split import check_split
from pengserve.simulator.engine.switches.switch import Switch, by_layer


async def restore(switch: Switch) -> SwitchReport:
    """Carries out a restore. Until all weights are back it may be called off."""
    loop, plan, run = asyncio.get_running_loop(), switch.plan, switch.leader.group
    assert run is not None
    started_s = loop.time()
    layers = switch.leader.sizes.stage_sizes(len(switch.members))
    await _bring_weights(switch, run, layers)
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
    await switch.send(by_layer(wave, layers, switch.token_bytes, is_drop=False))
    await asyncio.sleep(switch.remap_s + switch.around.costs.cutover_s)
    for traveller in wave:
        member = switch.members[traveller.rank]
        run.lane.remove([traveller.request])
        has_room = member.lane.admit(traveller.request, traveller.num_tokens)
        assert has_room, "its blocks were counted"
        switch.around.owner.moved([traveller.request], member.key, carried=True)
    rest = end_group(run)
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


async def _bring_weights(switch: Switch, run: GroupRun, layers: tuple[int, ...]) -> None:
    """Every member gets the layers that it misses, from the one that has kept them.

    Raises:
        StepError: too many blocks are in use to make room, or it took longer than the plan allows.
    """
    scheduler, sizes = run.lane.scheduler, switch.leader.sizes
    num_left = sizes.last_blocks(len(layers))
    if not run.lane.resize(min(num_left, scheduler.num_blocks)):
        num_used = scheduler.num_blocks - scheduler.num_free
        raise StepError(f"{num_left} blocks are left while weights come back, and {num_used} are in use")
    pairs = {
        (source, target): layers[source] * sizes.layer_bytes for source, target in permutations(range(len(layers)), 2)
    }
    try:
        async with asyncio.timeout(switch.plan.drain_timeout_s):
            await switch.send(pairs, is_weights=True)
    except BaseException as error:
        run.lane.resize(run.capacity.num_blocks)
        if isinstance(error, TimeoutError):
            raise StepError(f"the weights were not back within {switch.plan.drain_timeout_s:g} s") from None
        raise


def _assign(switch: Switch, run: GroupRun) -> list[Traveller]:
    """Each request goes where most blocks are left; what fits nowhere is resumed from its tokens."""
    sizes, scheduler = switch.leader.sizes, run.lane.scheduler
    free = [sizes.dp.num_blocks] * len(switch.members)
    wave: list[Traveller] = []
    for request in scheduler.running:
        computed = scheduler.computed_tokens(request)
        if not computed:
            continue  # nothing to carry: it is sent again
        needed = blocks_for(computed + 1, sizes.dp.block_size)
        rank = max(range(len(free)), key=lambda r: (free[r], -r))
        if free[rank] >= needed:
            free[rank] -= needed
            wave.append(Traveller(request, rank, computed))
    return wave
