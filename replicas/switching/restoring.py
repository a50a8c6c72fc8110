"""One pipeline becomes dp groups again (KunServe section 4.4). Both sides run in the step thread, between two steps."""

import time

from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.plans import SwitchReport
from pengserve.replicas.engine.handoff import revive
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.reshard import Traveller
from pengserve.replicas.engine.restore import LayerRestore
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Conversation, Member
from pengserve.replicas.switching.messages import SwitchMessage, Word


class LeaderRestore:
    """The leader's side of one restore. No microbatch is in flight."""

    def __init__(self, conversation: Conversation, lane: PpLane, group_name: str, epoch: Epoch) -> None:
        self._talk, self._lane, self._epoch = conversation, lane, epoch
        self._member, self._plan = conversation.member, conversation.plan
        self._restore = LayerRestore(self._member.lanes, lane, self._member.pool.get(group_name))

    def run(self, met: dict[InstanceKey, SwitchMessage]) -> SwitchReport:
        """Brings layers back and hands all requests on, then commits.

        Raises:
            StepError, EngineError: a member failed; the group is broken and its lane must be abandoned.
        """
        started_s = time.perf_counter()
        member, lane, plan = self._member, self._lane, self._plan
        wave = self._assign()
        going = {traveller.request_id for traveller in wave}
        self._talk.tell_all(Word.WAVE, travellers=wave)
        refused = set(take_restore(member, self._restore, wave))
        for message in self._talk.gather(Word.DONE).values():
            refused.update(message.refused)
        num_recomputed = max(0, lane.num_running() - len(going))
        rest = [request.request_id for request in lane.requests() if request.request_id not in going]
        lane.release([*going, *rest])
        for rank, key in enumerate(plan.members[1:], start=1):
            ids = [t.request_id for t in wave if t.rank == rank and t.request_id not in refused]
            member.owner.moved(ids, key, carried=True)
        reached("committing")
        self._talk.tell_all(Word.COMMIT)
        reached("committed")
        member.lanes.leave()
        member.owner.moved([*rest, *sorted(refused)], None, carried=False)
        return SwitchReport(
            plan_id=plan.plan_id,
            epoch=self._epoch,
            cutover_s=time.perf_counter() - started_s,
            num_carried=len(going - refused),
            num_recomputed=num_recomputed,
            num_redirected=len(rest) - num_recomputed + len(refused),
            carried_bytes=self._restore.sent_bytes,
        )

    def _assign(self) -> list[Traveller]:
        """Each request goes where most blocks are left; what fits nowhere is resumed from its tokens."""
        dp, lane = self._member.lanes.dp, self._lane
        free = [dp.capacity.num_blocks] * lane.num_stages
        wave: list[Traveller] = []
        for request in lane.carriable():
            handoff = self._member.owner.handoff(request)
            needed = dp.blocks_needed(request.num_computed_tokens)
            rank = max(range(len(free)), key=lambda r: (free[r], -r))
            if handoff is not None and free[rank] >= needed:
                free[rank] -= needed
                wave.append(Traveller(request.request_id, rank, lane.block_ids(request.request_id), handoff))
        return wave


def join_restore(conversation: Conversation, lane: PpLane, group_name: str) -> None:
    """A follower's side, from its MET to the COMMIT.

    Raises:
        StepError, EngineError: a member failed; the group is broken and its lane must be abandoned.
    """
    member, plan = conversation.member, conversation.plan
    restore = LayerRestore(member.lanes, lane, member.pool.get(group_name))
    conversation.say(plan.leader, Word.MET)
    reached("met")
    while True:
        _, message = conversation.hear(Word.WAVE, Word.COMMIT)
        if message.word is Word.COMMIT:
            reached("committed")
            break
        refused = take_restore(member, restore, message.travellers)
        conversation.say(plan.leader, Word.DONE, refused=refused)
    lane.forget(lane.known_ids())
    member.lanes.leave()


def take_restore(member: Member, restore: LayerRestore, wave: list[Traveller]) -> list[str]:
    """One member's part; ids of requests that were to come here and could not."""
    reached("wave")
    dp = member.lanes.dp
    taken: list[Request] = []

    def admit(traveller: Traveller) -> list[int] | None:
        client_index = member.owner.welcome(traveller.handoff)
        if client_index is None:
            return None
        request = revive(traveller.handoff, client_index)
        block_ids = dp.admit(request, traveller.num_tokens)
        if block_ids is not None:
            taken.append(request)
        return block_ids

    try:
        refused = restore.run(wave, admit)
    except Exception:
        # Their KV has not come, and nobody but the scheduler knows them.
        ids = [request.request_id for request in taken]
        dp.release(ids)
        member.owner.moved(ids, None, carried=False)
        raise
    reached("waved")
    for request in taken:
        dp.adopt(request)
        dp.settle(request)
    return refused
