"""Groups become one pipeline (KunServe section 4.1, 4.2): instances alone, narrower pipelines, or both. Both sides run
in the step thread, between two steps.

After the commit new requests run; those that ran before go on when their KV has come (`engine/exchange.py`).
"""

import time

from msgspec.structs import replace

from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.replicas.engine.exchange import DropExchange
from pengserve.replicas.engine.handoff import revive
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.reshard import Traveller
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Conversation, Member, parts_of
from pengserve.replicas.switching.merging import seed_of, settle_rest
from pengserve.replicas.switching.messages import MessageKind, SwitchMessage


class LeaderDrop:
    """The leader's side of one drop."""

    def __init__(self, conversation: Conversation, group_name: str, epoch: Epoch) -> None:
        self._talk, self._epoch = conversation, epoch
        self._member, self._plan = conversation.member, conversation.plan
        self._lane = self._member.lanes.pp(self._plan.group)
        self._communicator = self._member.pool.get(group_name)
        self.exchange = DropExchange(self._member.lanes, self._lane, parts_of(self._member, self._plan))
        self._wave: list[Traveller] = []
        self.has_begun = False  # once true, a failure costs the members' requests their KV

    def run(self, met: dict[InstanceKey, SwitchMessage], own: list[Traveller]) -> SwitchReport:
        """Moves memory and KV, then commits.

        Raises:
            StepError, EngineError: a member failed; `undo` puts this member back.
        """
        started_s = time.perf_counter()
        member, plan, lane = self._member, self._plan, self._lane
        coming = own + [traveller for message in met.values() for traveller in message.travellers]
        self._wave = [found for traveller in coming if (found := self._admit(traveller)) is not None]
        order = lane.withhold_free()
        self.has_begun = True
        self._talk.tell_all(MessageKind.WAVE, travellers=self._wave, lease=order)
        num_backed = take_drop(member, lane, self.exchange, plan, self._wave, order)
        heard = self._talk.gather(MessageKind.DONE)
        lane.offer(min([num_backed, *(message.num_free for message in heard.values())]))
        reached("committing")
        self._talk.tell_all(MessageKind.COMMIT)
        reached("committed")
        lane.followers = self._talk.followers
        num_redirected = leave_part(member, plan)
        member.lanes.enter(lane, seed_of(plan), self._communicator)
        num_redirected += finish_drop(member, lane, plan)
        return SwitchReport(
            plan_id=plan.plan_id,
            epoch=self._epoch,
            cutover_s=time.perf_counter() - started_s,
            num_carried=len(self._wave),
            num_recomputed=len(coming) - len(self._wave),
            num_redirected=num_redirected,
            carried_bytes=self.exchange.total_bytes,
        )

    def undo(self) -> None:
        """After a failure: back to dp, or where nothing had begun to what ran before."""
        if self.has_begun:
            undo_drop(self._member, self._lane)

    def _admit(self, traveller: Traveller) -> Traveller | None:
        """The traveller with its blocks in the lane; None where it finds no room, or its ingress is gone."""
        client_index = self._member.owner.welcome(traveller.handoff)
        if client_index is None:
            return None
        request = revive(traveller.handoff, client_index)
        logical_ids = self._lane.expect(request, traveller.num_tokens)
        if logical_ids is None:
            return None
        return replace(traveller, logical_ids=logical_ids)


def join_drop(conversation: Conversation, group_name: str, own: list[Traveller]) -> DropExchange:
    """A follower's side, from its MET to the COMMIT; the exchange that goes on from there.

    Raises:
        StepError: it was called off before anything moved; all is as before.
        EngineError: a member failed; this one is in dp, and its requests are resumed from their tokens.
    """
    member, plan = conversation.member, conversation.plan
    lane = member.lanes.pp(plan.group)
    communicator = member.pool.get(group_name)
    exchange = DropExchange(member.lanes, lane, parts_of(member, plan))
    has_begun = False
    try:
        conversation.say(plan.leader, MessageKind.MET, num_free=member.lanes.dp.num_free(), travellers=own)
        reached("met")
        while True:
            _, message = conversation.hear(MessageKind.WAVE, MessageKind.COMMIT)
            if message.kind is MessageKind.COMMIT:
                reached("committed")
                break
            has_begun = True
            num_backed = take_drop(member, lane, exchange, plan, message.travellers, message.lease)
            conversation.say(plan.leader, MessageKind.DONE, num_free=num_backed)
    except Exception:
        if has_begun:
            undo_drop(member, lane)
            member.pool.mark_failed(group_name)
        raise
    leave_part(member, plan)
    member.lanes.enter(lane, seed_of(plan), communicator)
    finish_drop(member, lane, plan)
    return exchange


def take_drop(
    member: Member, lane: PpLane, exchange: DropExchange, plan: SwitchPlan, wave: list[Traveller], order: list[int]
) -> int:
    """One member's part: memory of weights becomes room for KV, and the leader takes over this member's requests.

    Returns how many of the blocks in `order` have memory here.
    """
    reached("wave")
    num_backed = exchange.begin(wave, order)
    reached("waved")
    mine = [traveller.request_id for traveller in wave if traveller.rank == lane.rank]
    member.lanes.current.release(mine)
    if lane.rank != 0:
        member.owner.moved(mine, plan.leader, carried=True)
    return num_backed


def leave_part(member: Member, plan: SwitchPlan) -> int:
    """After a commit: where this member ran in a narrower pipeline, that ends. What is left in it goes to the leader,
    from its tokens; how many requests that are.
    """
    lane = member.lanes.running
    if lane is None:
        return 0
    going = [request.request_id for request in lane.requests()] if lane.rank == 0 else []
    if lane.rank == 0:
        lane.release(going)
    lane.forget(lane.known_ids())
    lane.table.release(lane.table.leased())
    member.lanes.return_all(lane)
    member.lanes.leave()
    member.owner.moved(going, plan.leader, carried=False)
    return len(going)


def finish_drop(member: Member, lane: PpLane, plan: SwitchPlan) -> int:
    """After a commit: what is left in `dp` goes to the leader, from its tokens, and all blocks to the lane."""
    num_redirected = settle_rest(member, plan, plan.leader)
    member.lanes.lend_all(lane)
    lane.is_settled, lane.is_exchanging = False, True
    return num_redirected


def undo_drop(member: Member, lane: PpLane) -> None:
    """To dp with all memory; KV is no longer where it was, so that all requests begin from their tokens."""
    lanes = member.lanes
    lost = [request.request_id for request in lanes.dp.requests()]
    lanes.dp.release(lost)
    if lane.rank == 0:
        lost += [request.request_id for request in lane.requests()]
    if lanes.running is not None and lanes.running is not lane:
        lost += lanes.abandon()
    lanes.discard(lane)
    member.owner.moved(list(dict.fromkeys(lost)), None, carried=False)
