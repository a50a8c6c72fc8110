"""Groups become one tp group (Flying Serving section 5): their running requests are re-sharded by head.

A part is an instance alone, or a narrower tp group. Each member of such a group has a share of the KV of all of its
requests: it sends what others need of that, and frees the group's blocks as the leader says, who knows what moves when.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.waves import Mover, merge_wave
from pengserve.replicas.engine.groups.group_run import GroupRun
from pengserve.replicas.engine.groups.tp_lane import TpLane
from pengserve.replicas.engine.lanes.handoff import revive
from pengserve.replicas.engine.lanes.lane import Lane
from pengserve.replicas.engine.movers.reshard import Resharder, Traveller
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.kv.ledger import NULL_BLOCK
from pengserve.replicas.switching.changes.change import Ask, Change
from pengserve.replicas.switching.changes.joining import brought, check_joining, send_rest
from pengserve.replicas.switching.changes.leaving import leave_group
from pengserve.replicas.switching.changes.part_blocks import PartBlocks
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
        lanes = member.lanes
        self._lane = lanes.registry.tp(plan.group)
        self._part = lanes.registry.tp(plan.part_of(member.key)) if lanes.running is not None else None
        self._resharder = Resharder(lanes, self._lane, self._part or lanes.dp, plan.parts, self.run.communicator)
        self._brought: set[str] = set()  # requests that move from here, or are given up
        self._carried: list[Traveller] = []  # leader: requests that are in the lane
        self._free: list[int] = []  # leader: blocks of `dp` by rank
        self._num_lendable = self._num_given_up = self._num_paused = self._num_left = 0

    @staticmethod
    def check(member: Member, wiring: Wiring, plan: SwitchPlan) -> None:
        check_joining(member, wiring, plan)

    def begin(self, kept: frozenset[str] | None) -> MergeMet:
        dp = self._member.lanes.dp
        coming = brought(self._member, self._plan, kept, self._pauses)
        self._brought = {traveller.request_id for traveller in coming}
        if self._part is None:
            freed = dp.blocks_freed([traveller.request_id for traveller in coming])
            coming = [replace(t, num_own=freed[t.request_id][0], shared=freed[t.request_id][1]) for t in coming]
        return MergeMet(
            num_free=dp.num_free(),
            num_lendable=dp.capacity.num_blocks - self._num_paused_blocks(),
            num_paused=len(self._paused()),
            device_blocks=dp.residency.device_blocks if dp.residency is not None else 0,
            travellers=coming,
            leased=self._part.table.leased() if self._part is not None and self._part.leads else [],
        )

    def move(self, met: Mapping[InstanceKey, MergeMet], ask: Ask[MergeWave, MergeDone]) -> None:
        """Moves all that finds room, a wave at a time: each frees the blocks it came from.

        Where a part is a group there is one at least: it ends what the group had beside that, and no member that has
        not taken part in it can believe that the merge was committed.
        """
        words = [met[key] for key in self._plan.members]
        self._num_lendable = min(word.num_lendable for word in words)
        self._num_paused = sum(word.num_paused for word in words)
        if self._lane.residency is not None:
            # A member whose host tier has ended lends no more blocks than its device holds.
            self._lane.residency.limit(min(word.device_blocks for word in words if word.device_blocks))
        travellers = {t.request_id: t for word in words for t in word.travellers}
        leased = {rank: word.leased for rank, word in enumerate(words) if self._leads_group(rank)}
        parts = PartBlocks(self._plan.parts, leased, travellers.values())
        self._free = [word.num_free + parts.num_idle(rank) for rank, word in enumerate(words)]
        left = tuple(self._mover(traveller, parts) for traveller in travellers.values())
        is_due = bool(leased)
        while left or is_due:
            wave = merge_wave(left, self._free)
            left, is_due = wave.left, False
            gone = [travellers[mover.request_id] for mover in (*wave.moving, *wave.given_up)]
            given_up = [mover.request_id for mover in wave.given_up]
            message = self._admit([travellers[mover.request_id] for mover in wave.moving], given_up, parts.leave(gone))
            self._carried += message.travellers
            self._num_given_up += len(message.given_up)
            done = ask(message)
            for traveller in message.travellers:
                self._settle(traveller)
            self._free = [done[key].num_free for key in self._plan.members]

    def _leads_group(self, rank: int) -> bool:
        key = self._plan.members[rank]
        part = self._plan.part_of(key)
        return part.degree > 1 and part.leader == key.instance_id

    def _mover(self, traveller: Traveller, parts: PartBlocks) -> Mover:
        is_of_group = self._leads_group(traveller.rank)
        num_own, shared = parts.freed_with(traveller) if is_of_group else (traveller.num_own, traveller.shared)
        return Mover(
            request_id=traveller.request_id,
            ranks=parts.ranks(traveller.rank),
            num_tokens=traveller.num_tokens,
            num_needed=self._lane.blocks_needed(traveller.num_tokens),
            num_own=num_own,
            shared=tuple(shared),
        )

    def _admit(self, moving: list[Traveller], given_up: list[str], freed: list[list[int]]) -> MergeWave:
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
            wave.append(replace(traveller, logical_ids=logical_ids, num_own=0, shared=[]))
        return MergeWave(travellers=wave, lease=lease, given_up=given_up, freed=freed)

    def _settle(self, traveller: Traveller) -> None:
        request = self._lane.request(traveller.request_id)
        self._lane.settle(request)
        if traveller.is_parked:
            self._lane.keep_parked(request)

    def take(self, message: MergeWave) -> MergeDone:
        """KV moves, and the leader takes over this member's requests.

        Blocks are leased only when those of the wave, and of the requests that are given up, have been freed.
        """
        reached("wave")
        wave, lanes = message.travellers, self._member.lanes
        collected = self._resharder.collect(wave)
        reached("waved")
        if (source := self._source) is not None:
            self._let_go(source, wave, message.given_up)
        if self._part is not None:
            self._free_blocks(self._part, message.freed[self._plan.parts.index(self._plan.part_of(self._member.key))])
        lanes.leases.lease(self._lane, message.lease)
        self._resharder.place(wave, collected)
        return MergeDone(num_free=lanes.dp.num_free())

    @property
    def _source(self) -> Lane | None:
        """The lane whose requests this member brings; None where another leads its part."""
        if self._part is None:
            return self._member.lanes.dp
        return self._part if self._part.leads else None

    def _let_go(self, source: Lane, wave: list[Traveller], given_up: list[str]) -> None:
        """Of a group also what does not move: that has ended, and its blocks are needed."""
        owner = self._member.owner
        mine = [traveller.request_id for traveller in wave if traveller.rank == self._lane.rank]
        lost = [request_id for request_id in given_up if source.knows(request_id)]
        rest: list[str] = []
        if self._part is not None:
            rest = [r.request_id for r in source.requests() if r.request_id not in self._brought]
            self._num_left += len(rest)
        source.release(mine + lost + rest)
        if not self._leads:
            owner.moved(mine, self._plan.leader, carried=True)
        owner.moved(lost + rest, self._plan.leader, carried=False)

    def _free_blocks(self, part: TpLane, freed: list[int]) -> None:
        """Blocks of the part that nothing needs any more go back to `dp`."""
        if part.leads and set(part.shrink_all()) != set(freed):
            raise EngineError(f"what {part.name} has free is not what the leader of {self._plan.group} has counted")
        self._member.lanes.leases.reclaim(part, freed)

    def commit(self) -> SwitchReport:
        lanes = self._member.lanes
        if self._leads:
            self._lane.may_hold(self._num_lendable)
        if self._part is not None:
            leave_group(lanes, self._part)
        lanes.enter(self._lane, self.run)
        num_redirected = self._num_left
        if self._part is None:
            num_redirected += send_rest(self._member, self._plan.leader, {r.request_id for r in self._paused()})
        self._running_group.begin(self.run)
        return self._report(
            num_carried=len(self._carried),
            num_recomputed=self._num_given_up,
            num_paused=self._num_paused,
            num_redirected=num_redirected,
            carried_bytes=self._resharder.sent_bytes,
        )

    def undo(self) -> None:
        """What was carried already has lost its KV, and a narrower group ends with all that it has left."""
        lanes = self._member.lanes
        lost = [t.request_id for t in self._carried if not lanes.dp.knows(t.request_id)]
        if self._part is not None and lanes.running is self._part:
            lost += lanes.abandon()
        lanes.discard(self._lane)
        self._member.owner.moved(list(dict.fromkeys(lost)), None, carried=False)

    def _pauses(self, request: Request) -> bool:
        """Whether a request stays in `dp`. Those of a group cannot: its lane ends."""
        if self._part is not None:
            return not self._part.leads
        return self._plan.pauses(request.priority) or self._member.lanes.dp.is_parked(request)

    def _paused(self) -> list[Request]:
        """Requests that stay in `dp`; beside a group, those that an earlier merge has left there."""
        requests = self._member.lanes.dp.carriable()
        return requests if self._part is not None else [request for request in requests if self._pauses(request)]

    def _num_paused_blocks(self) -> int:
        """Blocks that the group cannot have: those of requests that pause."""
        block_ids = self._member.lanes.dp.block_ids
        return len(
            {block_id for request in self._paused() for block_id in block_ids(request.request_id)} - {NULL_BLOCK}
        )
