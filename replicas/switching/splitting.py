"""One tp group becomes dp groups again. Both sides run in the step thread, between two steps of the group."""

import time

from pengserve.planners.stages import stage_layers
from pengserve.planners.types.errors import StepError
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.plans import SwitchPlan, SwitchReport, SwitchStrategy
from pengserve.planners.waves import split_wave
from pengserve.replicas.engine.handoff import revive
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.reshard import Resharder, Traveller
from pengserve.replicas.engine.tp_lane import TpLane
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Conversation, Member
from pengserve.replicas.switching.messages import MessageKind, SwitchMessage


class LeaderSplit:
    """The leader's side of one split."""

    def __init__(self, conversation: Conversation, lane: TpLane, group_name: str, epoch: Epoch) -> None:
        self._talk, self._lane, self._epoch = conversation, lane, epoch
        self._member, self._plan = conversation.member, conversation.plan
        self._resharder = Resharder(self._member.lanes, lane, self._member.pool.get(group_name))
        self._free: list[int] = []  # blocks of `dp` by rank
        self._release: list[int] = []  # logical blocks that leave the lane with the next wave
        self._num_carried = 0

    def run(self, met: dict[InstanceKey, SwitchMessage]) -> SwitchReport:
        """Hands all requests on, then commits.

        Raises:
            StepError, EngineError: a member failed; the group is broken and its lane must be abandoned.
        """
        started_s = time.perf_counter()
        member, lane = self._member, self._lane
        self._free = [member.lanes.dp.num_free(), *(met[key].num_free for key in self._talk.followers)]
        going = lane.carriable() if self._plan.strategy is not SwitchStrategy.SOFT else []
        while going:
            wave, going = self._next_wave(going)
            if not wave:
                break
            self._run_wave(wave)
        rest = [request.request_id for request in lane.requests()]
        num_running = lane.num_running()
        lane.release(rest)
        reached("committing")
        self._talk.tell_all(MessageKind.COMMIT)
        reached("committed")
        finish_split(member, lane)
        lane.shrink_all()
        member.owner.moved(rest, None, carried=False)
        return SwitchReport(
            plan_id=self._plan.plan_id,
            epoch=self._epoch,
            cutover_s=time.perf_counter() - started_s,
            num_carried=self._num_carried,
            num_recomputed=num_running,
            num_redirected=len(rest) - num_running,
            carried_bytes=self._resharder.sent_bytes,
        )

    def _next_wave(self, going: list[Request]) -> tuple[list[Traveller], list[Request]]:
        """Each request goes where most blocks are free; what fits nowhere waits for the next wave."""
        dp, lane = self._member.lanes.dp, self._lane
        released = lane.shrink_all()
        self._release = released
        self._free = [free + len(released) for free in self._free]
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
                wave.append(Traveller(request.request_id, rank, lane.block_ids(request.request_id), handoff))
        return wave, left

    def _run_wave(self, wave: list[Traveller]) -> None:
        member, plan = self._member, self._plan
        self._talk.tell_all(MessageKind.WAVE, travellers=wave, release=self._release)
        refused = set(take_split_wave(member, self._lane, self._resharder, wave, self._release))
        heard = self._talk.gather(MessageKind.DONE)
        self._free = [member.lanes.dp.num_free(), *(heard[key].num_free for key in self._talk.followers)]
        for message in heard.values():
            refused.update(message.refused)
        self._lane.release([traveller.request_id for traveller in wave])
        for rank, key in enumerate(plan.members):
            ids = [t.request_id for t in wave if t.rank == rank and t.request_id not in refused]
            if rank != 0:
                member.owner.moved(ids, key, carried=True)
            self._num_carried += len(ids)
        member.owner.moved(sorted(refused), None, carried=False)


def join_split(conversation: Conversation, lane: TpLane, group_name: str) -> None:
    """A follower's side, from its MET to the COMMIT.

    Raises:
        StepError, EngineError: a member failed; the group is broken and its lane must be abandoned.
    """
    member, plan = conversation.member, conversation.plan
    resharder = Resharder(member.lanes, lane, member.pool.get(group_name))
    conversation.say(plan.leader, MessageKind.MET, num_free=member.lanes.dp.num_free())
    reached("met")
    while True:
        _, message = conversation.hear(MessageKind.WAVE, MessageKind.COMMIT)
        if message.kind is MessageKind.COMMIT:
            reached("committed")
            break
        refused = take_split_wave(member, lane, resharder, message.travellers, message.release)
        lane.forget([traveller.request_id for traveller in message.travellers])
        conversation.say(plan.leader, MessageKind.DONE, num_free=member.lanes.dp.num_free(), refused=refused)
    lane.forget(lane.known_ids())
    finish_split(member, lane)


def take_split_wave(
    member: Member, lane: TpLane, resharder: Resharder, wave: list[Traveller], release: list[int]
) -> list[str]:
    """One member's part in a wave; ids of requests that were to come here and could not."""
    reached("wave")
    lanes = member.lanes
    lanes.reclaim(lane, release)
    taken: list[Request] = []

    def admit(traveller: Traveller) -> list[int] | None:
        client_index = member.owner.welcome(traveller.handoff)
        if client_index is None:
            return None
        request = revive(traveller.handoff, client_index)
        block_ids = lanes.dp.admit(request, traveller.num_tokens)
        if block_ids is not None:
            taken.append(request)
        return block_ids

    try:
        refused = resharder.split(wave, admit)
    except Exception:
        # Their KV has not come. Only the scheduler of `dp` knows these requests: its workers have not adopted them.
        ids = [request.request_id for request in taken]
        lanes.dp.release(ids)
        member.owner.moved(ids, None, carried=False)
        raise
    reached("waved")
    for request in taken:
        lanes.dp.adopt(request)
        lanes.dp.settle(request)
    return refused


def finish_split(member: Member, lane: TpLane) -> None:
    """After a commit: all blocks go back to `dp`, which runs from the next step on."""
    member.lanes.leave()
    member.lanes.reclaim(lane, lane.table.leased())


def check_split(member: Member, plan: SwitchPlan) -> None:
    """Whether this member can take part now.

    Raises:
        StepError: why it cannot.
    """
    lane = member.lanes.running
    if lane is None or lane.name != str(plan.group):
        raise StepError(f"instance {member.key} does not run {plan.group}")
    if member.key != plan.leader:
        return
    if isinstance(lane, PpLane) and lane.is_exchanging:
        raise StepError(f"{lane.name} still waits for KV or memory since its drop; restore it when that has come")
    limit = _most_tokens(member, plan)
    for request in lane.requests():
        if min(request.num_prompt_tokens + request.max_tokens, lane.capacity.max_model_len) > limit:
            raise StepError(
                f"request {request.request_id} may grow to {request.num_prompt_tokens + request.max_tokens} tokens and"
                f" {min(plan.parts, key=lambda part: part.degree)} holds {limit}; wait until it has ended"
            )


def _most_tokens(member: Member, plan: SwitchPlan) -> int:
    """Most tokens that a request can have in any of the parts that the group ends in."""
    dp, fewest = member.lanes.dp, min(part.degree for part in plan.parts)
    if fewest == 1:
        return dp.capacity.max_model_len
    assert dp.memory is not None
    sizes = dp.memory.layers.sizes
    return sizes.num_pipeline_blocks(stage_layers(sizes.num_layers, fewest)) * dp.capacity.block_size
