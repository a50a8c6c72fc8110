"""dp groups become one tp group. Both sides run in the step thread, between two steps, once all members have met."""

import time
import zlib
from collections.abc import Sequence
from itertools import zip_longest

from pengserve.planners.types.errors import StepError
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.layout import GroupKind
from pengserve.planners.types.plans import SwitchPlan, SwitchReport, SwitchStrategy
from pengserve.replicas.engine.handoff import revive
from pengserve.replicas.engine.reshard import MAX_WAVE_TOKENS, Resharder, Traveller
from pengserve.replicas.engine.tp_lane import TpLane
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Conversation, Member
from pengserve.replicas.switching.messages import SwitchMessage, Word


def travellers(member: Member, plan: SwitchPlan, kept: frozenset[str] | None) -> list[Traveller]:
    """What this member brings: the requests whose KV goes along. Under `hard` only urgent ones: the others pause.

    Args:
        kept: under sequential and soft, the ids that ran when the switch was asked for; what has begun since is
            recomputed, as the paper does.
    """
    rank = plan.members.index(member.key)
    found = []
    for request in member.lanes.dp.carriable():
        if pauses(plan, request):
            continue
        if kept is None or request.request_id in kept:
            handoff = member.owner.handoff(request)
            if handoff is not None:
                found.append(Traveller(request.request_id, rank, [], handoff))
    return found


class LeaderMerge:
    """The leader's side of one merge."""

    def __init__(self, conversation: Conversation, group_name: str, epoch: Epoch) -> None:
        self._talk, self._epoch = conversation, epoch
        self._member, self._plan = conversation.member, conversation.plan
        self._lane = self._member.lanes.tp(self._plan.group)
        self._communicator = self._member.pool.get(group_name)
        self._resharder = Resharder(self._member.lanes, self._lane, self._communicator)
        self._carried: list[Traveller] = []
        self._free: dict[InstanceKey, int] = {}
        self._bytes = 0

    @property
    def has_begun(self) -> bool:
        """Whether KV has moved, so that a failure costs the requests that were carried."""
        return bool(self._carried)

    def run(self, met: dict[InstanceKey, SwitchMessage], own: list[Traveller]) -> SwitchReport:
        """Moves what can be moved, then commits.

        Raises:
            StepError, EngineError: a member failed; `undo` puts this member back.
        """
        started_s = time.perf_counter()
        lanes, plan = self._member.lanes, self._plan
        self._free = {key: message.num_free for key, message in met.items()}
        left = self._waves(in_turn([own, *(message.travellers for message in met.values())]))
        reached("committing")
        self._talk.tell_all(Word.COMMIT)
        reached("committed")
        self._lane.num_lendable = min([lanes.dp.num_free(), *self._free.values()])
        self._lane.followers = self._talk.followers
        lanes.enter(self._lane, seed_of(plan), self._communicator)
        num_redirected = settle_rest(self._member, plan)
        return SwitchReport(
            plan_id=plan.plan_id,
            epoch=self._epoch,
            cutover_s=time.perf_counter() - started_s,
            num_carried=len(self._carried),
            num_recomputed=len(left),
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

    def _waves(self, coming: list[Traveller]) -> list[Traveller]:
        """Moves all that finds room, a wave at a time: each frees the blocks it came from. What found none."""
        while coming:
            wave, lease, coming = self._next_wave(coming)
            if not wave:
                break
            self._run_wave(wave, lease)
        return coming

    def _next_wave(self, coming: list[Traveller]) -> tuple[list[Traveller], list[int], list[Traveller]]:
        lanes, lane = self._member.lanes, self._lane
        room = min([lanes.dp.num_free(), *self._free.values()])
        wave: list[Traveller] = []
        lease: list[int] = []
        left: list[Traveller] = []
        num_tokens = 0
        for traveller in coming:
            needed = lane.blocks_needed(traveller.num_tokens)
            missing = max(0, needed - lane.num_free())
            full = len(lease) + missing > room or num_tokens > MAX_WAVE_TOKENS
            client_index = None if full else self._member.owner.welcome(traveller.handoff)
            if client_index is None:
                left.append(traveller)
                continue
            lease += lane.grow(missing)
            request = revive(traveller.handoff, client_index)
            logical_ids = lane.admit(request, traveller.num_tokens)
            assert logical_ids is not None, "blocks were leased for it"
            num_tokens += traveller.num_tokens
            wave.append(Traveller(traveller.request_id, traveller.rank, logical_ids, traveller.handoff))
        return wave, lease, left

    def _run_wave(self, wave: list[Traveller], lease: list[int]) -> None:
        self._carried += wave
        self._talk.tell_all(Word.WAVE, travellers=wave, lease=lease)
        take_wave(self._member, self._lane, self._resharder, wave, lease)
        for traveller in wave:
            self._lane.settle(self._lane.request(traveller.request_id))
        self._bytes = self._resharder.sent_bytes
        for key, message in self._talk.gather(Word.DONE).items():
            self._free[key] = message.num_free


def in_turn(brought: Sequence[Sequence[Traveller]]) -> list[Traveller]:
    """One of each member in turn: the fullest decides what fits, so that each wave must free blocks at all of them."""
    return [traveller for turn in zip_longest(*brought) for traveller in turn if traveller is not None]


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
        conversation.say(plan.leader, Word.MET, num_free=member.lanes.dp.num_free(), travellers=own)
        reached("met")
        while True:
            _, message = conversation.hear(Word.WAVE, Word.COMMIT)
            if message.word is Word.COMMIT:
                reached("committed")
                break
            has_begun = True
            take_wave(member, lane, resharder, message.travellers, message.lease)
            conversation.say(plan.leader, Word.DONE, num_free=member.lanes.dp.num_free())
    except Exception:
        if has_begun:
            member.lanes.discard(lane)
            member.pool.mark_failed(group_name)
        raise
    member.lanes.enter(lane, seed_of(plan), communicator)
    settle_rest(member, plan)


def take_wave(member: Member, lane: TpLane, resharder: Resharder, wave: list[Traveller], lease: list[int]) -> None:
    """One member's part in a wave: KV moves, and what was this member's own is the leader's from now on."""
    reached("wave")
    member.lanes.lease(lane, lease)
    resharder.merge(wave)
    reached("waved")
    rank = lane.rank
    mine = [traveller.request_id for traveller in wave if traveller.rank == rank]
    member.lanes.dp.release(mine)
    if rank != 0:
        member.owner.moved(mine, resharder.leader, carried=True)


def settle_rest(member: Member, plan: SwitchPlan) -> int:
    """After a commit: what waits in `dp` goes to the leader, from its tokens; under hard, what runs stays paused."""
    dp = member.lanes.dp
    stays = {request.request_id for request in dp.carriable() if pauses(plan, request)}
    going = [request.request_id for request in dp.requests() if request.request_id not in stays]
    dp.release(going)
    member.owner.moved(going, plan.leader, carried=False)
    return len(going)


def pauses(plan: SwitchPlan, request: Request) -> bool:
    """Whether a running request waits in its `dp` lane until the group is split (hard preemption).

    Never on a drop: the memory it is in changes hands.
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
    running = member.lanes.running
    if running is not None:
        raise StepError(f"instance {member.key} runs {running.name}; split that first")
    member.lanes.require(plan.group)
