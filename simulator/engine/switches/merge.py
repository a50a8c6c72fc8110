"""dp groups become one tp group: their running requests are carried by head, paused, or end first."""

import asyncio

from pengserve.planners.types.errors import StepError
from pengserve.planners.types.layout import GroupKind
from pengserve.planners.types.plans import SwitchPlan, SwitchReport, SwitchStrategy
from pengserve.simulator.engine.group import GroupRun, Traveller
from pengserve.simulator.engine.instance import SimInstance
from pengserve.simulator.engine.switches.draining import drain
from pengserve.simulator.engine.switches.switch import Switch, by_head
from pengserve.simulator.requests import LiveRequest

MAX_WAVE_TOKENS = 1 << 15  # as `replicas.engine.reshard`


def check_merge(plan: SwitchPlan, member: SimInstance) -> None:
    """Raise StepError where this member cannot take part in a merge or drop now."""
    if member.group is not None:
        raise StepError(f"instance {member.key} runs {member.group.group}; end that first")
    if not any(name.startswith(f"{plan.group}/") for name in member.groups_ready):
        raise StepError(f"instance {member.key} is not connected with the members of {plan.group}")


async def merge(switch: Switch) -> SwitchReport:
    """Carries out a merge. Until it has met it may be called off."""
    loop, plan = asyncio.get_running_loop(), switch.plan
    kept, drain_s = await drain(switch)
    meet_s = await switch.meet()
    started_s = loop.time()
    run = await switch.begin_group()
    carried, left = await _carry(switch, run, travellers(switch, kept))
    await asyncio.sleep(switch.around.costs.cutover_s)
    if not switch.leader.sizes.is_static:
        num_free = min(member.lane.scheduler.num_free for member in switch.members)
        assert run.lane.resize(num_free), "carried requests have their blocks"
    switch.enter_group(run)
    num_redirected = settle_rest(switch)
    num_paused = len(switch.leader.lane.scheduler.running)
    note_stall(carried, loop.time() - started_s)
    return SwitchReport(
        plan_id=plan.plan_id,
        epoch=switch.epoch,
        drain_s=drain_s,
        meet_s=meet_s,
        cutover_s=loop.time() - started_s,
        num_carried=len(carried),
        num_recomputed=len(left),
        num_paused=num_paused,
        num_redirected=num_redirected,
        carried_bytes=switch.sent_bytes,
    )


def travellers(switch: Switch, kept: frozenset[LiveRequest] | None = None) -> list[Traveller]:
    """What members bring along, by rank; of those that drained, what is left of `kept` alone."""
    found = []
    for rank, member in enumerate(switch.members):
        scheduler = member.lane.scheduler
        found += [
            Traveller(request, rank, num_tokens)
            for request in scheduler.running
            if (num_tokens := scheduler.computed_tokens(request))
            and not pauses(switch.plan, request)
            and (kept is None or request in kept)
        ]
    return found


def settle_rest(switch: Switch) -> int:
    """After the commit: what waits at members goes to the leader, from its tokens. How many did at the leader."""
    counts = []
    for member in switch.members:
        scheduler = member.lane.scheduler
        going = [request for request in scheduler.running if not pauses(switch.plan, request)]
        going += scheduler.waiting
        member.lane.remove(going)
        switch.around.owner.moved(going, switch.leader.key, carried=False)
        counts.append(len(going))
    return counts[0]


def pauses(plan: SwitchPlan, request: LiveRequest) -> bool:
    """Whether a running request waits in its dp lane until the group is split (hard preemption)."""
    is_hard = plan.group.kind is GroupKind.TP and plan.strategy is SwitchStrategy.HARD
    return is_hard and request.arrival.priority >= 0


def note_stall(requests: list[LiveRequest], seconds: float) -> None:
    """These did not run for so long."""
    for request in requests:
        request.stalls_s += seconds


async def _carry(switch: Switch, run: GroupRun, coming: list[Traveller]) -> tuple[list[LiveRequest], list[Traveller]]:
    """Moves all that finds room, a wave at a time: each frees the blocks it came from. What was carried, and left."""
    carried: list[LiveRequest] = []
    num_leased = 0
    while coming:
        room = min(member.lane.scheduler.num_free for member in switch.members) - num_leased
        wave: list[Traveller] = []
        left: list[Traveller] = []
        num_tokens = 0
        for traveller in coming:
            needed = run.blocks_needed(traveller.num_tokens)
            if needed > room or num_tokens > MAX_WAVE_TOKENS:
                left.append(traveller)
                continue
            room -= needed
            num_leased += needed
            num_tokens += traveller.num_tokens
            wave.append(traveller)
        if not wave:
            break
        await switch.send(by_head(wave, len(switch.members), switch.token_bytes, is_merge=True))
        for traveller in wave:
            switch.members[traveller.rank].lane.remove([traveller.request])
            has_room = run.lane.admit(traveller.request, traveller.num_tokens)
            assert has_room, "blocks were leased for it"
            switch.around.owner.moved([traveller.request], switch.leader.key, carried=True)
            carried.append(traveller.request)
        coming = left
    return carried, coming
