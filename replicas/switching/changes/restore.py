"""One pipeline ends in instances alone, in narrower pipelines, or in both (KunServe section 4.4).

The weights that its members miss have come beside the steps by then (`engine/movers/weights_return.py`).
"""

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from pengserve.planners.stages import stage_layers
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.layout import GroupKind
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.waves import place
from pengserve.replicas.engine.groups.pp_lane import PpLane
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from pengserve.replicas.engine.lanes.handoff import revive
from pengserve.replicas.engine.movers.reshard import Traveller
from pengserve.replicas.engine.movers.restore import LayerRestore
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.switching.changes.change import Ask, Change
from pengserve.replicas.switching.changes.joining import send_rest
from pengserve.replicas.switching.changes.leaving import check_leaving
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.messages import Gather, Gathered, Place, Placed, RestoreDone, RestoreMet, RestoreWave
from pengserve.replicas.switching.running_group import RunningGroup
from pengserve.replicas.switching.wiring import Wiring


class Restore(Change[RestoreMet, Gather | Place | RestoreWave, Gathered | Placed | RestoreDone]):
    """One member's part in a restore. It goes on alone, or in a narrower pipeline."""

    returns_weights = True
    rounds = (Gather, Place, RestoreWave)

    def __init__(self, member: Member, wiring: Wiring, running_group: RunningGroup, plan: SwitchPlan) -> None:
        super().__init__(member, wiring, running_group, plan)
        self._lane, parts = member.lanes.registry.pp(plan.group), member.parts_of(plan)
        self._parts, communicator = parts, member.pool.get(running_group.name)
        part = plan.part_of(member.key)
        self._keys = plan.keys(part)  # of this member's part
        self._rank = plan.members.index(self._keys[0])  # of the part's leader, in the group that ends
        self._narrower: PpLane | None = None
        if part.kind is GroupKind.PP:
            self._narrower = member.lanes.registry.pp(part)
            self.run = self._new_run(part, self._keys)
        self._restore = LayerRestore(member.lanes, self._lane, parts, communicator, self._narrower)
        self._has_begun = False
        self._taken: list[Request] = []  # leader of a part: requests that have come
        self._going: set[str] = set()  # leader: requests that have gone on with their KV

    @staticmethod
    def check(member: Member, wiring: Wiring, plan: SwitchPlan) -> None:
        check_leaving(member, plan)
        part = plan.part_of(member.key)
        if part.kind is not GroupKind.DP:
            member.lanes.registry.require(part)
            member.pool.get(wiring.spec_of(part, plan.keys(part)).name)

    @property
    def _next(self) -> DpLane | PpLane:
        """The lane in which this member goes on."""
        return self._narrower or self._member.lanes.dp

    def begin(self, kept: frozenset[str] | None) -> RestoreMet:
        return RestoreMet(host_rows=self._lane.num_host_rows)

    def move(
        self,
        met: Mapping[InstanceKey, RestoreMet],
        ask: Ask[Gather | Place | RestoreWave, Gathered | Placed | RestoreDone],
    ) -> None:
        """All members hear of the requests that go on, and of their blocks there, in the same order."""
        host_rows = [met[key].host_rows for key in self._plan.members]
        wave = self._assign(self._gather(ask) if any(host_rows) else host_rows)
        words = ask(Place(travellers=wave, host_rows=host_rows)).values()
        found = {t.request_id: t for word in words if isinstance(word, Placed) for t in word.travellers}
        placed = [found[traveller.request_id] for traveller in wave if traveller.request_id in found]
        ask(RestoreWave(travellers=placed))
        self._going = set(found)
        for rank, key in enumerate(self._plan.members):
            if rank != 0:
                self._member.owner.moved([t.request_id for t in placed if t.rank == rank], key, carried=True)

    def _gather(self, ask: Ask[Gather | Place | RestoreWave, Gathered | Placed | RestoreDone]) -> list[int]:
        """What can go on with its KV comes to stand still; by rank, rows of the hosts that are free then."""
        ids = [request.request_id for request in self._lane.carriable()]
        words = ask(Gather(blocks=list({b for request_id in ids for b in self._lane.block_ids(request_id)})))
        found = [words[key] for key in self._plan.members]
        return [word.num_free for word in found if isinstance(word, Gathered)]

    def _assign(self, host_rows: list[int]) -> list[Traveller]:
        """Each request goes where most blocks are left. What fits nowhere is resumed from its tokens.

        Args:
            host_rows: by rank, of the host tiers, those that are free.
        """
        lane = self._lane
        found = [(request, self._member.owner.handoff(request)) for request in lane.carriable()]
        tokens = [request.num_computed_tokens for request, handoff in found if handoff is not None]
        free = [self._num_places(part, host_rows) for part in range(len(self._parts.sizes))]
        places = iter(place([(count, lane.blocks_needed(count)) for count in tokens], free))
        return [
            Traveller(
                request.request_id,
                self._parts.start(part),
                lane.block_ids(request.request_id),
                handoff,
                is_parked=lane.is_parked(request),
            )
            for request, handoff in found
            if handoff is not None and (part := next(places)) is not None
        ]

    def _num_places(self, part: int, host_rows: list[int]) -> int:
        """Blocks that all members of a part have places for."""
        dp, lane = self._member.lanes.dp, self._lane
        assert dp.memory is not None
        layers, size, first = dp.memory.layers, self._parts.sizes[part], self._parts.start(part)
        if size == 1:
            return min(dp.capacity.num_blocks, layers.base_blocks - 1 + host_rows[first])
        stages = stage_layers(layers.sizes.num_layers, size)
        per_row = layers.sizes.num_layers // max(stop - start for start, stop in stages) if lane.sizes.per_row else 0
        return layers.sizes.num_pipeline_blocks(stages) + min(host_rows[first : first + size]) * per_row

    def take(self, message: Gather | Place | RestoreWave) -> Gathered | Placed | RestoreDone:
        """KV stands still; requests get blocks in this member's part; then their KV comes."""
        if isinstance(message, Gather):
            return Gathered(num_free=self._stand_still(message.blocks))
        if isinstance(message, Place):
            return Placed(travellers=self._place(message))
        reached("wave")
        self._restore.run(message.travellers)
        reached("waved")
        if self._keys[0] != self._member.key:
            for traveller in message.travellers:
                if traveller.rank == self._rank:
                    self._next.adopt(revive(traveller.handoff, 0))
        parked = {traveller.request_id for traveller in message.travellers if traveller.is_parked}
        for request in self._taken:
            self._next.adopt(request)
            self._next.settle(request)
            if request.request_id in parked:
                self._next.keep_parked(request)
        return RestoreDone()

    def _stand_still(self, blocks: list[int]) -> int:
        """KV of these blocks of the lane stands still; rows of the host tier that are free then."""
        tiers, dp_tiers = self._lane.tiers, self._member.lanes.dp.tiers
        if tiers is None or dp_tiers is None:
            return 0
        dp_tiers.forget_all()
        tiers.gather(np.array(self._lane.table.physical(blocks), dtype=np.int64))
        return dp_tiers.host.num_free

    def _place(self, message: Place) -> list[Traveller]:
        """Where this member leads its part, gives the requests that come there blocks; those that found room.

        From here on the blocks of `dp` are free: the lane that ends has given them back.
        """
        self._has_begun = True
        self._member.lanes.leases.return_all(self._lane)
        if self._narrower is not None and self._keys[0] == self._member.key:
            self._narrower.share_hosts(min(message.host_rows[self._rank : self._rank + len(self._keys)]))
        placed: list[Traveller] = []
        for traveller in message.travellers if self._keys[0] == self._member.key else []:
            client_index = self._member.owner.welcome(traveller.handoff) if traveller.rank == self._rank else None
            if client_index is None:
                continue
            request = revive(traveller.handoff, client_index)
            if (block_ids := self._next.admit(request, traveller.num_tokens)) is not None:
                self._taken.append(request)
                placed.append(replace(traveller, part_ids=block_ids))
        return placed

    def commit(self) -> SwitchReport:
        """This member leaves the group that ends, and runs in its part."""
        lane, lanes, rest, num_recomputed = self._lane, self._member.lanes, [], 0
        if self._leads:
            num_recomputed = max(0, lane.num_running() - len(self._going))
            rest = [request.request_id for request in lane.requests() if request.request_id not in self._going]
            lane.release([*self._going, *rest])
        lane.forget(lane.known_ids())
        lane.table.release(lane.table.leased())
        lanes.leave()
        self._running_group.end()
        if self._narrower is not None:
            self._enter(self._narrower)
        self._member.owner.moved(rest, None, carried=False)
        return self._report(
            num_carried=len(self._going),
            num_recomputed=num_recomputed,
            num_redirected=len(rest) - num_recomputed,
            carried_bytes=self._restore.sent_bytes,
        )

    def _enter(self, lane: PpLane) -> None:
        assert self.run is not None
        num_ids = lane.capacity.num_blocks if lane.tiers is None else lane.tiers.kv.placement.num_blocks - 1
        every = range(1, num_ids + 1)
        lane.table.lease(every, every)
        if lane.tiers is not None:
            lane.tiers.all_came()
        self._member.lanes.enter(lane, self.run)
        send_rest(self._member, self._keys[0])
        self._member.lanes.leases.lend_all(lane)
        self._running_group.begin(self.run)

    def undo(self) -> None:
        """What came here begins from its tokens."""
        if not self._has_begun:
            return
        ids = [request.request_id for request in self._taken]
        if self._narrower is not None:
            self._member.lanes.discard(self._narrower)
        else:
            self._member.lanes.dp.release(ids)
        self._member.owner.moved(ids, None, carried=False)
