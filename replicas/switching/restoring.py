"""One pipeline ends in instances alone, in narrower pipelines, or in both (KunServe section 4.4). Both sides run in the
step thread, between two steps.
"""

import time

from pengserve.planners.stages import stage_layers
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.plans import SwitchReport
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.reshard import Traveller
from pengserve.replicas.engine.restore import LayerRestore
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Conversation, parts_of
from pengserve.replicas.switching.messages import MessageKind
from pengserve.replicas.switching.restore_target import RestoreTarget


class LeaderRestore:
    """The leader's side of one restore. No microbatch is in flight."""

    def __init__(
        self, conversation: Conversation, lane: PpLane, target: RestoreTarget, group_name: str, epoch: Epoch
    ) -> None:
        self._talk, self._lane, self._target, self._epoch = conversation, lane, target, epoch
        self._member, self._plan = conversation.member, conversation.plan
        self._parts = parts_of(self._member, self._plan)
        self._restore = LayerRestore(self._member.lanes, lane, self._parts, self._member.pool.get(group_name))

    def run(self) -> SwitchReport:
        """Hands all requests on, then commits.

        Raises:
            StepError, EngineError: a member failed; the group is broken and its lane must be abandoned.
        """
        started_s = time.perf_counter()
        try:
            placed = self._place()
            self._talk.tell_all(MessageKind.WAVE, travellers=placed)
            take_restore(self._restore, self._target, placed)
            self._talk.gather(MessageKind.DONE)
            self._tell_moved(placed)
            reached("committing")
            self._talk.tell_all(MessageKind.COMMIT)
        except Exception:
            self._target.undo()
            raise
        reached("committed")
        num_recomputed, rest = self._release({traveller.request_id for traveller in placed})
        self._target.enter()
        self._member.owner.moved(rest, None, carried=False)
        return SwitchReport(
            plan_id=self._plan.plan_id,
            epoch=self._epoch,
            cutover_s=time.perf_counter() - started_s,
            num_carried=len(placed),
            num_recomputed=num_recomputed,
            num_redirected=len(rest) - num_recomputed,
            carried_bytes=self._restore.sent_bytes,
        )

    def _place(self) -> list[Traveller]:
        """The requests that go on, with their blocks there; all members hear of them in the same order."""
        wave = self._assign()
        self._talk.tell_all(MessageKind.PLACE, travellers=wave)
        placed = {traveller.request_id: traveller for traveller in self._target.place(wave)}
        for message in self._talk.gather(MessageKind.PLACED).values():
            placed |= {traveller.request_id: traveller for traveller in message.travellers}
        return [placed[traveller.request_id] for traveller in wave if traveller.request_id in placed]

    def _assign(self) -> list[Traveller]:
        """Each request goes where most blocks are left; what fits nowhere is resumed from its tokens."""
        lane, memory = self._lane, self._member.lanes.dp.memory
        assert memory is not None
        sizes = memory.layers.sizes
        free = [sizes.num_pipeline_blocks(stage_layers(sizes.num_layers, size)) for size in self._parts.sizes]
        wave: list[Traveller] = []
        for request in lane.carriable():
            handoff = self._member.owner.handoff(request)
            needed = lane.blocks_needed(request.num_computed_tokens)
            part = max(range(len(free)), key=lambda p: (free[p], -p))
            if handoff is not None and free[part] >= needed:
                free[part] -= needed
                logical_ids, rank = lane.block_ids(request.request_id), self._parts.start(part)
                wave.append(Traveller(request.request_id, rank, logical_ids, handoff))
        return wave

    def _release(self, going: set[str]) -> tuple[int, list[str]]:
        """Empties the lane: how many that ran lose their KV, and the ids of all that go on from their tokens."""
        num_recomputed = max(0, self._lane.num_running() - len(going))
        rest = [request.request_id for request in self._lane.requests() if request.request_id not in going]
        self._lane.release([*going, *rest])
        return num_recomputed, rest

    def _tell_moved(self, placed: list[Traveller]) -> None:
        going: dict[InstanceKey, list[str]] = {}
        for traveller in placed:
            going.setdefault(self._plan.members[traveller.rank], []).append(traveller.request_id)
        for key, ids in going.items():
            if key != self._member.key:
                self._member.owner.moved(ids, key, carried=True)


def join_restore(conversation: Conversation, lane: PpLane, target: RestoreTarget, group_name: str) -> None:
    """A follower's side, from its MET to the COMMIT.

    Raises:
        StepError, EngineError: a member failed; the group is broken and its lane must be abandoned.
    """
    member, plan = conversation.member, conversation.plan
    restore = LayerRestore(member.lanes, lane, parts_of(member, plan), member.pool.get(group_name))
    try:
        conversation.say(plan.leader, MessageKind.MET)
        reached("met")
        _, message = conversation.hear(MessageKind.PLACE)
        conversation.say(plan.leader, MessageKind.PLACED, travellers=target.place(message.travellers))
        _, message = conversation.hear(MessageKind.WAVE)
        take_restore(restore, target, message.travellers)
        conversation.say(plan.leader, MessageKind.DONE)
        conversation.hear(MessageKind.COMMIT)
    except Exception:
        target.undo()
        raise
    reached("committed")
    target.enter()


def take_restore(restore: LayerRestore, target: RestoreTarget, wave: list[Traveller]) -> None:
    """One member's part."""
    reached("wave")
    restore.run(wave)
    reached("waved")
    target.settle(wave)
