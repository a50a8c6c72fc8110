"""dp groups become one tp group. Both sides run in the step thread, between two steps, once all members have met."""

import time
import zlib

from msgspec.structs import replace

from pengserve.planners.types.errors import StepError
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.layout import GroupKind
from pengserve.planners.types.plans import SwitchPlan, SwitchReport, SwitchStrategy
from pengserve.planners.waves import Mover, merge_wave
from pengserve.replicas.engine.handoff import revive
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.reshard import Resharder, Traveller
from pengserve.replicas.engine.tp_lane import TpLane
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.memory.ledger import NULL_BLOCK
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Conversation, Member
from pengserve.replicas.switching.messages import MessageKind, SwitchMessage


def travellers(member: Member, plan: SwitchPlan, kept: frozenset[str] | None) -> list[Traveller]:
    """What this member brings: the requests whose KV goes along. Under `hard` only urgent ones: the others pause.

    Args:
        kept: under sequential and soft, the ids that ran when the switch was asked for; what has begun since is
            recomputed, as the paper does.
    """
    rank, lane = plan.members.index(member.key), member.lanes.current
    found = []
    for request in lane.carriable():
        if pauses(plan, request):
            continue
        if kept is None or request.request_id in kept:
            handoff = member.owner.handoff(request)
            if handoff is not None:
                part_ids = lane.block_ids(request.request_id) if lane is member.lanes.running else []
                found.append(Traveller(request.request_id, rank, [], handoff, part_ids))
    if plan.group.kind is not GroupKind.TP:
        return found
    freed = lane.blocks_freed([traveller.request_id for traveller in found])
    return [replace(t, num_own=freed[t.request_id][0], shared=freed[t.request_id][1]) for t in found]


class LeaderMerge:
    """The leader's side of one merge."""

    def __init__(self, conversation: Conversation, group_name: str, epoch: Epoch) -> None:
        self._talk, self._epoch = conversation, epoch
        self._member, self._plan = conversation.member, conversation.plan
        self._lane = self._member.lanes.tp(self._plan.group)
        self._communicator = self._member.pool.get(group_name)
        self._resharder = Resharder(self._member.lanes, self._lane, self._communicator)
        self._carried: list[Traveller] = []
        self._free: list[int] = []  # blocks of `dp` by rank
        self._num_given_up = self._bytes = 0

    def run(self, met: dict[InstanceKey, SwitchMessage], own: list[Traveller]) -> SwitchReport:
        """Moves what can be moved, then commits.

        Raises:
            StepError, EngineError: a member failed; `undo` puts this member back.
        """
        started_s = time.perf_counter()
        lanes, plan = self._member.lanes, self._plan
        self._free = [lanes.dp.num_free(), *(met[key].num_free for key in self._talk.followers)]
        self._waves([*own, *(traveller for message in met.values() for traveller in message.travellers)])
        reached("committing")
        self._talk.tell_all(MessageKind.COMMIT)
        reached("committed")
        lendable = [num_lendable(self._member, plan), *(message.num_lendable for message in met.values())]
        self._lane.num_lendable = min(lendable) - self._lane.num_held
        self._lane.followers = self._talk.followers
        lanes.enter(self._lane, seed_of(plan), self._communicator)
        num_redirected = settle_rest(self._member, plan, plan.leader)
        return SwitchReport(
            plan_id=plan.plan_id,
            epoch=self._epoch,
            cutover_s=time.perf_counter() - started_s,
            num_carried=len(self._carried),
            num_recomputed=self._num_given_up,
            num_paused=lanes.dp.num_requests(),
            num_redirected=num_redirected,
            carried_bytes=self._bytes,
        )

    def undo(self) -> None:
        """After a failure: back to dp. What was carried already has lost its KV and is resumed from its tokens."""
        lanes = self._member.lanes
        here = lanes.dp.knows
        lost = [traveller.request_id for traveller in self._carried if not here(traveller.request_id)]
        lanes.discard(self._lane)
        self._member.owner.moved(lost, None, carried=False)

    def _waves(self, coming: list[Traveller]) -> None:
        """Moves all that finds room, a wave at a time: each frees the blocks it came from."""
        travellers = {traveller.request_id: traveller for traveller in coming}
        left = tuple(self._mover(traveller) for traveller in coming)
        while left:
            wave = merge_wave(left, self._free)
            left = wave.left
            given_up = [mover.request_id for mover in wave.given_up]
            self._run_wave([travellers[mover.request_id] for mover in wave.moving], given_up)

    def _mover(self, traveller: Traveller) -> Mover:
        return Mover(
            request_id=traveller.request_id,
            rank=traveller.rank,
            num_tokens=traveller.num_tokens,
            num_needed=self._lane.blocks_needed(traveller.num_tokens),
            num_own=traveller.num_own,
            shared=tuple(traveller.shared),
        )

    def _run_wave(self, moving: list[Traveller], given_up: list[str]) -> None:
        lane, owner = self._lane, self._member.owner
        wave: list[Traveller] = []
        lease: list[int] = []
        for traveller in moving:
            client_index = owner.welcome(traveller.handoff)
            if client_index is None:
                given_up.append(traveller.request_id)
                continue
            lease += lane.grow(max(0, lane.blocks_needed(traveller.num_tokens) - lane.num_free()))
            logical_ids = lane.admit(revive(traveller.handoff, client_index), traveller.num_tokens)
            assert logical_ids is not None, "blocks were leased for it"
            wave.append(Traveller(traveller.request_id, traveller.rank, logical_ids, traveller.handoff))
        self._carried += wave
        self._num_given_up += len(given_up)
        self._talk.tell_all(MessageKind.WAVE, travellers=wave, lease=lease, refused=given_up)
        take_wave(self._member, lane, self._resharder, wave, lease, given_up)
        for traveller in wave:
            lane.settle(lane.request(traveller.request_id))
        self._bytes = self._resharder.sent_bytes
        heard = self._talk.gather(MessageKind.DONE)
        self._free = [self._member.lanes.dp.num_free(), *(heard[key].num_free for key in self._talk.followers)]


def join_merge(conversation: Conversation, group_name: str, own: list[Traveller]) -> None:
    """A follower's side, from its MET to the COMMIT.

    Raises:
        StepError: it was called off before anything moved; all is as before.
        EngineError: a member failed; this one is back in dp, and what had moved is resumed from its tokens.
    """
    member, plan = conversation.member, conversation.plan
    lane = member.lanes.tp(plan.group)
    communicator = member.pool.get(group_name)
    resharder = Resharder(member.lanes, lane, communicator)
    has_begun = False
    try:
        dp, lendable = member.lanes.dp, num_lendable(member, plan)
        conversation.say(plan.leader, MessageKind.MET, num_free=dp.num_free(), num_lendable=lendable, travellers=own)
        reached("met")
        while True:
            _, message = conversation.hear(MessageKind.WAVE, MessageKind.COMMIT)
            if message.kind is MessageKind.COMMIT:
                reached("committed")
                break
            has_begun = True
            take_wave(member, lane, resharder, message.travellers, message.lease, message.refused)
            conversation.say(plan.leader, MessageKind.DONE, num_free=dp.num_free())
    except Exception:
        if has_begun:
            member.lanes.discard(lane)
            member.pool.mark_failed(group_name)
        raise
    member.lanes.enter(lane, seed_of(plan), communicator)
    settle_rest(member, plan, plan.leader)


def take_wave(
    member: Member, lane: TpLane, resharder: Resharder, wave: list[Traveller], lease: list[int], given_up: list[str]
) -> None:
    """One member's part in a wave: KV moves, and the leader takes over this member's requests.

    Blocks are leased only when those of the wave, and of the requests that go on from their tokens, have been freed.
    """
    reached("wave")
    collected = resharder.collect(wave)
    reached("waved")
    dp, owner = member.lanes.dp, member.owner
    mine = [traveller.request_id for traveller in wave if traveller.rank == lane.rank]
    lost = [request_id for request_id in given_up if dp.knows(request_id)]
    dp.release(mine + lost)
    if lane.rank != 0:
        owner.moved(mine, resharder.leader, carried=True)
    owner.moved(lost, resharder.leader, carried=False)
    member.lanes.lease(lane, lease)
    resharder.place(wave, collected)


def settle_rest(member: Member, plan: SwitchPlan, leader: InstanceKey) -> int:
    """After a commit: what waits in `dp` goes to `leader`, from its tokens; under hard, what runs stays paused."""
    dp = member.lanes.dp
    stays = paused(member, plan)
    going = [request.request_id for request in dp.requests() if request.request_id not in stays]
    dp.release(going)
    member.owner.moved(going, leader, carried=False)
    return len(going)


def num_lendable(member: Member, plan: SwitchPlan) -> int:
    """Blocks of `dp` that the group can have after the commit: all but those of requests that pause."""
    dp = member.lanes.dp
    kept = {block_id for request_id in paused(member, plan) for block_id in dp.block_ids(request_id)}
    return dp.capacity.num_blocks - len(kept - {NULL_BLOCK})


def paused(member: Member, plan: SwitchPlan) -> set[str]:
    """Requests that stay in `dp`."""
    return {request.request_id for request in member.lanes.dp.carriable() if pauses(plan, request)}


def pauses(plan: SwitchPlan, request: Request) -> bool:
    """Whether a running request waits in its `dp` lane until the group is split (hard preemption).

    Never on a drop: memory of `dp` is remapped then.
    """
    is_merge = plan.group.kind is GroupKind.TP
    return is_merge and plan.strategy is SwitchStrategy.HARD and request.priority >= 0


def seed_of(plan: SwitchPlan) -> int:
    """Of the lane's random state: the same on all members, another for each switch."""
    return zlib.crc32(plan.plan_id.encode())


def check_merge(member: Member, plan: SwitchPlan) -> None:
    """Whether this member can take part now.

    Raises:
        StepError: why it cannot.
    """
    running, part = member.lanes.running, plan.part_of(member.key)
    runs, due = running.name if running is not None else "dp", "dp" if part.kind is GroupKind.DP else str(part)
    if runs != due:
        raise StepError(f"instance {member.key} runs {runs}, and the plan is made for {due}; plan again")
    if isinstance(running, PpLane) and (not running.is_settled or (running.rank == 0 and running.is_exchanging)):
        raise StepError(f"{running.name} still waits for KV, memory or weights; ask again when they have come")
    member.lanes.require(plan.group)
