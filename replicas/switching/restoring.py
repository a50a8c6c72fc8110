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
from pengserve.replicas.switching.landing import Landing
from pengserve.replicas.switching.member import Conversation, parts_of
from pengserve.replicas.switching.messages import Word


class LeaderRestore:
    """The leader's side of one restore. No microbatch is in flight."""

    def __init__(
        self, conversation: Conversation, lane: PpLane, landing: Landing, group_name: str, epoch: Epoch
    ) -> None:
        self._talk, self._lane, self._landing, self._epoch = conversation, lane, landing, epoch
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
            self._talk.tell_all(Word.WAVE, travellers=placed)
            take_restore(self._restore, self._landing, placed)
            self._talk.gather(Word.DONE)
            self._tell_moved(placed)
            reached("committing")
            self._talk.tell_all(Word.COMMIT)
        except Exception:
            self._landing.undo()
            raise
        reached("committed")
        num_recomputed, rest = self._release({traveller.request_id for traveller in placed})
        self._landing.land()
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
        self._talk.tell_all(Word.PLACE, travellers=wave)
        placed = {traveller.request_id: traveller for traveller in self._landing.place(wave)}
        for message in self._talk.gather(Word.PLACED).values():
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


def join_restore(conversation: Conversation, lane: PpLane, landing: Landing, group_name: str) -> None:
    """A follower's side, from its MET to the COMMIT.

    Raises:
        StepError, EngineError: a member failed; the group is broken and its lane must be abandoned.
    """
    member, plan = conversation.member, conversation.plan
    restore = LayerRestore(member.lanes, lane, parts_of(member, plan), member.pool.get(group_name))
    try:
        conversation.say(plan.leader, Word.MET)
        reached("met")
        _, message = conversation.hear(Word.PLACE)
        conversation.say(plan.leader, Word.PLACED, travellers=landing.place(message.travellers))
        _, message = conversation.hear(Word.WAVE)
        take_restore(restore, landing, message.travellers)
        conversation.say(plan.leader, Word.DONE)
        conversation.hear(Word.COMMIT)
    except Exception:
        landing.undo()
        raise
    reached("committed")
    landing.land()


def take_restore(restore: LayerRestore, landing: Landing, wave: list[Traveller]) -> None:
    """One member's part."""
    reached("wave")
    restore.run(wave)
    reached("waved")
    landing.settle(wave)
