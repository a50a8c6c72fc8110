"""One tp group becomes dp groups again: each request goes, with its KV, where most blocks are free."""

from collections.abc import Mapping

from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.strategy import SwitchStrategy
from pengserve.planners.waves import split_wave
from pengserve.replicas.engine.lanes.handoff import revive
from pengserve.replicas.engine.movers.reshard import Resharder, Traveller
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.switching.changes.change import Ask, Change
from pengserve.replicas.switching.changes.leaving import check_leaving, leave_group
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.messages import SplitDone, SplitMet, SplitWave
from pengserve.replicas.switching.running_group import RunningGroup
from pengserve.replicas.switching.wiring import Wiring


class Split(Change[SplitMet, SplitWave, SplitDone]):
    """One member's part in a split."""

    rounds = (SplitWave,)

    def __init__(self, member: Member, wiring: Wiring, running_group: RunningGroup, plan: SwitchPlan) -> None:
        super().__init__(member, wiring, running_group, plan)
        self._lane = member.lanes.registry.tp(plan.group)
        self._resharder = Resharder(
            member.lanes, self._lane, member.lanes.dp, plan.parts, member.pool.get(running_group.name)
        )
        self._free: list[int] = []  # leader: blocks of `dp` by rank
        self._num_carried = 0

    @staticmethod
    def check(member: Member, wiring: Wiring, plan: SwitchPlan) -> None:
        check_leaving(member, plan)

    def begin(self, kept: frozenset[str] | None) -> SplitMet:
        return SplitMet(num_free=self._member.lanes.dp.num_free())

    def move(self, met: Mapping[InstanceKey, SplitMet], ask: Ask[SplitWave, SplitDone]) -> None:
        """Moves what finds room, a wave at a time; the rest goes on from its tokens, and under soft all of it."""
        self._free = [met[key].num_free for key in self._plan.members]
        going = self._lane.carriable() if self._plan.strategy is not SwitchStrategy.SOFT else []
        while going:
            released = self._lane.shrink_all()
            self._free = [free + len(released) for free in self._free]
            wave, going = self._next_wave(going)
            if not wave:
                break
            done = ask(SplitWave(travellers=wave, release=released))
            self._lane.release([traveller.request_id for traveller in wave])
            self._free = [done[key].num_free for key in self._plan.members]
            self._tell_moved(wave, {request_id for word in done.values() for request_id in word.refused})

    def _next_wave(self, going: list[Request]) -> tuple[list[Traveller], list[Request]]:
        """Each request goes where most blocks are free; what fits nowhere waits for the next wave."""
        dp, lane = self._member.lanes.dp, self._lane
        handoffs = [self._member.owner.handoff(request) for request in going]
        # Where there is none, its ingress is gone, and its abort is on the way.
        leaving = [(request, handoff) for request, handoff in zip(going, handoffs, strict=True) if handoff is not None]
        sizes = [(r.num_computed_tokens, dp.blocks_needed(r.num_computed_tokens)) for r, _ in leaving]
        wave: list[Traveller] = []
        left: list[Request] = []
        for (request, handoff), rank in zip(leaving, split_wave(sizes, self._free), strict=True):
            if rank is None:
                left.append(request)
            else:
                block_ids, is_parked = lane.block_ids(request.request_id), lane.is_parked(request)
                wave.append(Traveller(request.request_id, rank, block_ids, handoff, is_parked=is_parked))
        return wave, left

    def _tell_moved(self, wave: list[Traveller], refused: set[str]) -> None:
        for rank, key in enumerate(self._plan.members):
            ids = [t.request_id for t in wave if t.rank == rank and t.request_id not in refused]
            if rank != 0:
                self._member.owner.moved(ids, key, carried=True)
            self._num_carried += len(ids)
        self._member.owner.moved(sorted(refused), None, carried=False)

    def take(self, message: SplitWave) -> SplitDone:
        """KV comes together at the members that the requests go to."""
        reached("wave")
        lanes, wave = self._member.lanes, message.travellers
        lanes.leases.reclaim(self._lane, message.release)
        taken: list[Request] = []

        def admit(traveller: Traveller) -> list[int] | None:
            client_index = self._member.owner.welcome(traveller.handoff)
            if client_index is None:
                return None
            request = revive(traveller.handoff, client_index)
            block_ids = lanes.dp.admit(request, traveller.num_tokens)
            if block_ids is not None:
                taken.append(request)
            return block_ids

        try:
            refused = self._resharder.split(wave, admit)
        except Exception:
            # Their KV has not come. Only the scheduler of `dp` knows these requests: its workers have not adopted them.
            ids = [request.request_id for request in taken]
            lanes.dp.release(ids)
            self._member.owner.moved(ids, None, carried=False)
            raise
        reached("waved")
        parked = {traveller.request_id for traveller in wave if traveller.is_parked}
        for request in taken:
            lanes.dp.adopt(request)
            lanes.dp.settle(request)
            if request.request_id in parked:
                lanes.dp.keep_parked(request)
        if not self._leads:
            self._lane.forget([traveller.request_id for traveller in wave])
        return SplitDone(num_free=lanes.dp.num_free(), refused=refused)

    def commit(self) -> SwitchReport:
        """All blocks go back to `dp`, which runs from the next step on."""
        lanes, lane, rest, num_running = self._member.lanes, self._lane, [], 0
        if self._leads:
            rest, num_running = [request.request_id for request in lane.requests()], lane.num_running()
            lane.release(rest)
        leave_group(lanes, lane)
        self._running_group.end()
        self._member.owner.moved(rest, None, carried=False)
        return self._report(
            num_carried=self._num_carried,
            num_recomputed=num_running,
            num_redirected=len(rest) - num_running,
            carried_bytes=self._resharder.sent_bytes,
        )

    def undo(self) -> None:
        """What went to `dp` lanes stays there; the group's lane goes with the group."""
