"""dp groups become one tp group (Flying Serving section 5): their running requests are re-sharded by head."""

from collections.abc import Mapping

from msgspec.structs import replace

from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.waves import Mover, merge_wave
from pengserve.replicas.engine.group_run import GroupRun
from pengserve.replicas.engine.handoff import revive
from pengserve.replicas.engine.reshard import Resharder, Traveller
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.kv.ledger import NULL_BLOCK
from pengserve.replicas.switching.changes.change import Ask, Change
from pengserve.replicas.switching.changes.joining import brought, check_joining, send_rest
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.messages import MergeDone, MergeMet, MergeWave
from pengserve.replicas.switching.running_group import RunningGroup
from pengserve.replicas.switching.wiring import Wiring


class Merge(Change[MergeMet, MergeWave, MergeDone]):
    """One member's part in a merge."""

    rounds = (MergeWave,)
    run: GroupRun

    def __init__(self, member: Member, wiring: Wiring, running_group: RunningGroup, plan: SwitchPlan) -> None:
        super().__init__(member, wiring, running_group, plan)
        self.run = self._new_run(plan.group, plan.members)
        self._lane = member.lanes.registry.tp(plan.group)
        self._resharder = Resharder(member.lanes, self._lane, self.run.communicator)
        self._carried: list[Traveller] = []  # leader: requests that are in the lane
        self._free: list[int] = []  # leader: blocks of `dp` by rank
        self._num_lendable = self._num_given_up = self._num_paused = 0

    @staticmethod
    def check(member: Member, wiring: Wiring, plan: SwitchPlan) -> None:
        check_joining(member, wiring, plan)

    def begin(self, kept: frozenset[str] | None) -> MergeMet:
        dp, coming = self._member.lanes.dp, brought(self._member, self._plan, kept, self._pauses)
        freed = dp.blocks_freed([traveller.request_id for traveller in coming])
        return MergeMet(
            num_free=dp.num_free(),
            num_lendable=dp.capacity.num_blocks - self._num_paused_blocks(),
            num_paused=len(self._paused()),
            device_blocks=dp.residency.device_blocks if dp.residency is not None else 0,
            travellers=[replace(t, num_own=freed[t.request_id][0], shared=freed[t.request_id][1]) for t in coming],
        )

    def move(self, met: Mapping[InstanceKey, MergeMet], ask: Ask[MergeWave, MergeDone]) -> None:
        """Moves all that finds room, a wave at a time: each frees the blocks it came from."""
        self._num_lendable = min(word.num_lendable for word in met.values())
        self._num_paused = sum(word.num_paused for word in met.values())
        if self._lane.residency is not None:
            self._lane.residency.limit(min(word.device_blocks for word in met.values()))
        self._free = [met[key].num_free for key in self._plan.members]
        travellers = {t.request_id: t for key in self._plan.members for t in met[key].travellers}
        left = tuple(map(self._mover, travellers.values()))
        while left:
            wave = merge_wave(left, self._free)
            left = wave.left
            given_up = [mover.request_id for mover in wave.given_up]
            message = self._admit([travellers[mover.request_id] for mover in wave.moving], given_up)
            self._carried += message.travellers
            self._num_given_up += len(message.given_up)
            done = ask(message)
            for traveller in message.travellers:
                self._lane.settle(self._lane.request(traveller.request_id))
            self._free = [done[key].num_free for key in self._plan.members]

    def _mover(self, traveller: Traveller) -> Mover:
        return Mover(
            request_id=traveller.request_id,
            rank=traveller.rank,
            num_tokens=traveller.num_tokens,
            num_needed=self._lane.blocks_needed(traveller.num_tokens),
            num_own=traveller.num_own,
            shared=tuple(traveller.shared),
        )

    def _admit(self, moving: list[Traveller], given_up: list[str]) -> MergeWave:
        """Gives these requests blocks of the lane; those whose ingress is gone are given up too."""
        lane, wave, lease = self._lane, [], []
        for traveller in moving:
            client_index = self._member.owner.welcome(traveller.handoff)
            if client_index is None:
                given_up.append(traveller.request_id)
                continue
            lease += lane.grow(max(0, lane.blocks_needed(traveller.num_tokens) - lane.num_free()))
            logical_ids = lane.admit(revive(traveller.handoff, client_index), traveller.num_tokens)
            assert logical_ids is not None, "blocks were leased for it"
            wave.append(Traveller(traveller.request_id, traveller.rank, logical_ids, traveller.handoff))
        return MergeWave(travellers=wave, lease=lease, given_up=given_up)

    def take(self, message: MergeWave) -> MergeDone:
        """KV moves, and the leader takes over this member's requests.

        Blocks are leased only when those of the wave, and of the requests that are given up, have been freed.
        """
        reached("wave")
        wave, lanes, owner = message.travellers, self._member.lanes, self._member.owner
        collected = self._resharder.collect(wave)
        reached("waved")
        mine = [traveller.request_id for traveller in wave if traveller.rank == self._lane.rank]
        lost = [request_id for request_id in message.given_up if lanes.dp.knows(request_id)]
        lanes.dp.release(mine + lost)
        if not self._leads:
            owner.moved(mine, self._plan.leader, carried=True)
        owner.moved(lost, self._plan.leader, carried=False)
        lanes.leases.lease(self._lane, message.lease)
        self._resharder.place(wave, collected)
        return MergeDone(num_free=lanes.dp.num_free())

    def commit(self) -> SwitchReport:
        lanes = self._member.lanes
        if self._leads:
            self._lane.may_hold(self._num_lendable)
        lanes.enter(self._lane, self.run)
        num_redirected = send_rest(self._member, self._plan.leader, {r.request_id for r in self._paused()})
        self._running_group.begin(self.run)
        return self._report(
            num_carried=len(self._carried),
            num_recomputed=self._num_given_up,
            num_paused=self._num_paused,
            num_redirected=num_redirected,
            carried_bytes=self._resharder.sent_bytes,
        )

    def undo(self) -> None:
        """What was carried already has lost its KV."""
        lanes = self._member.lanes
        lost = [t.request_id for t in self._carried if not lanes.dp.knows(t.request_id)]
        lanes.discard(self._lane)
        self._member.owner.moved(lost, None, carried=False)

    def _pauses(self, request: Request) -> bool:
        return self._plan.pauses(request.priority) or self._member.lanes.dp.is_parked(request)

    def _paused(self) -> list[Request]:
        return [request for request in self._member.lanes.dp.carriable() if self._pauses(request)]

    def _num_paused_blocks(self) -> int:
        """Blocks that the group cannot have: those of requests that pause."""
        block_ids = self._member.lanes.dp.block_ids
        return len(
            {block_id for request in self._paused() for block_id in block_ids(request.request_id)} - {NULL_BLOCK}
        )
