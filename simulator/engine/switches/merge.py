"""Groups become one tp group: their running requests are carried by head, paused, or end first.

Those of a narrower tp group go along also where others are paused: its lane ends.
"""

import asyncio
from collections.abc import Collection

from pengserve.planners.taking_part import require_joining
from pengserve.planners.types.errors import StepError
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.waves import Mover, merge_wave
from pengserve.simulator.engine.group import SimGroup, SimTraveller
from pengserve.simulator.engine.instance import SimInstance
from pengserve.simulator.engine.switches.draining import drain
from pengserve.simulator.engine.switches.switch import SimSwitch, by_head
from pengserve.simulator.requests import LiveRequest


def check_merge(plan: SwitchPlan, member: SimInstance) -> None:
    """Raise StepError where this member cannot take part in a merge or drop now."""
    run = member.group
    is_waiting = run is not None and run.is_exchanging
    require_joining(plan, member.key, "dp" if run is None else str(run.group), is_waiting=is_waiting)
    if not any(name.startswith(f"{plan.group}/") for name in member.groups_ready):
        raise StepError(f"instance {member.key} is not connected with the members of {plan.group}")


async def merge(switch: SimSwitch) -> SwitchReport:
    """Carries out a merge. Until it has met it may be called off."""
    loop, plan = asyncio.get_running_loop(), switch.plan
    kept, drain_s = await drain(switch)
    meet_s = await switch.meet()
    started_s = loop.time()
    run = await switch.begin_group()
    carried, num_given_up = await _carry(switch, run, travellers(switch, kept))
    await asyncio.sleep(switch.around.costs.cutover_s)
    rest = _take_rest(switch, [member for member in switch.members if member.group is not None])
    left = switch.leave_parts()
    if not switch.leader.sizes.is_static:
        num_free = min(member.lane.scheduler.num_free for member in switch.members)
        assert run.lane.resize(num_free), "carried requests have their blocks"
    switch.enter_group(run)
    switch.around.owner.moved(left, switch.leader.key, carried=False)
    num_redirected = _send_rest(switch, rest) + len(left)
    num_paused = sum(len(member.lane.scheduler.running) for member in switch.members)
    note_stall(carried, loop.time() - started_s)
    return SwitchReport(
        plan_id=plan.plan_id,
        epoch=switch.epoch,
        drain_s=drain_s,
        meet_s=meet_s,
        cutover_s=loop.time() - started_s,
        num_carried=len(carried),
        num_recomputed=num_given_up,
        num_paused=num_paused,
        num_redirected=num_redirected,
        carried_bytes=switch.sent_bytes,
    )


def travellers(switch: SimSwitch, kept: frozenset[LiveRequest] | None = None) -> list[SimTraveller]:
    """What parts bring along, by the rank of who leads them; of those that drained, what is left of `kept` alone."""
    found = []
    for rank, member in enumerate(switch.members):
        scheduler, is_alone = member.current.scheduler, member.group is None
        found += [
            SimTraveller(request, rank, num_tokens)
            for request in (() if member.is_follower else scheduler.running)
            if (num_tokens := scheduler.computed_tokens(request))
            and not (is_alone and pauses(switch.plan, request))
            and (kept is None or request in kept)
        ]
    return found


def settle_rest(switch: SimSwitch) -> int:
    """After the commit: what waits at members goes to the leader, from its tokens. How many did at the leader."""
    return _send_rest(switch, _take_rest(switch))


def _take_rest(switch: SimSwitch, grouped: Collection[SimInstance] = ()) -> list[list[LiveRequest]]:
    """What neither moved nor pauses leaves its member: by rank. Beside a group, `dp` has only what pauses."""
    rest: list[list[LiveRequest]] = []
    for member in switch.members:
        scheduler = member.lane.scheduler
        going = [request for request in scheduler.running if not pauses(switch.plan, request)]
        going = [] if member in grouped else [*going, *scheduler.waiting]
        member.lane.remove(going)
        rest.append(going)
    return rest


def _send_rest(switch: SimSwitch, rest: list[list[LiveRequest]]) -> int:
    for going in rest:
        switch.around.owner.moved(going, switch.leader.key, carried=False)
    return len(rest[0])


def pauses(plan: SwitchPlan, request: LiveRequest) -> bool:
    """Whether a running request waits in its dp lane until the group is split (hard preemption)."""
    return plan.pauses(request.arrival.priority)


def note_stall(requests: list[LiveRequest], seconds: float) -> None:
    """These did not run for so long."""
    for request in requests:
        request.stalls_s += seconds


async def _carry(switch: SimSwitch, run: SimGroup, coming: list[SimTraveller]) -> tuple[list[LiveRequest], int]:
    """Moves all that finds room, a wave at a time: each frees the blocks it came from. What was carried; how many were
    given up.
    """
    carried: list[LiveRequest] = []
    num_given_up = num_leased = 0
    travelling = {traveller.request.request_id: traveller for traveller in coming}
    left = _movers(switch, run, coming)
    while left:
        wave = merge_wave(left, [_num_free(member) - num_leased for member in switch.members])
        left = wave.left
        moving = [travelling[mover.request_id] for mover in wave.moving]
        await switch.send(by_head(moving, switch.parts, switch.token_bytes, is_merge=True))
        for mover in wave.given_up:
            switch.members[mover.ranks[0]].current.remove([travelling[mover.request_id].request])
            switch.around.owner.moved([travelling[mover.request_id].request], switch.leader.key, carried=False)
        for traveller in moving:
            switch.members[traveller.rank].current.remove([traveller.request])
            has_room = run.lane.admit(traveller.request, traveller.num_tokens)
            assert has_room, "blocks were leased for it"
            switch.around.owner.moved([traveller.request], switch.leader.key, carried=True)
            carried.append(traveller.request)
        num_given_up += len(wave.given_up)
        num_leased += sum(mover.num_needed for mover in wave.moving)
    return carried, num_given_up


def _num_free(member: SimInstance) -> int:
    """Blocks of `dp` that no request holds, also none of the narrower group that the member is in."""
    num_free, part = member.lane.scheduler.num_free, member.group
    if part is not None:
        num_free -= part.lane.scheduler.num_blocks - part.lane.scheduler.num_free
    return num_free


def _movers(switch: SimSwitch, run: SimGroup, coming: list[SimTraveller]) -> tuple[Mover, ...]:
    movers, first = [], 0
    for part in switch.plan.parts:
        own = [traveller for traveller in coming if traveller.rank == first]
        scheduler = switch.members[first].current.scheduler
        freed = scheduler.blocks_freed([traveller.request for traveller in own])
        movers += [
            Mover(
                request_id=traveller.request.request_id,
                ranks=tuple(range(first, first + part.degree)),
                num_tokens=traveller.num_tokens,
                num_needed=run.blocks_needed(traveller.num_tokens),
                num_own=num_own,
                shared=tuple(shared),
            )
            for traveller, (num_own, shared) in zip(own, freed, strict=True)
        ]
        first += part.degree
    return tuple(movers)
