"""One pipeline ends in instances alone, in narrower pipelines, or in both (KunServe section 4.4).

The weights that its members miss have come beside the steps by then (`engine/movers/weights_return.py`).
"""

from collections.abc import Mapping

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
from pengserve.replicas.kv.stage_rows import stage_rows_in_row
from pengserve.replicas.switching.changes.change import Ask, Change
from pengserve.replicas.switching.changes.joining import send_rest
from pengserve.replicas.switching.changes.leaving import check_leaving
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.messages import Place, Placed, RestoreDone, RestoreMet, RestoreWave
from pengserve.replicas.switching.running_group import RunningGroup
from pengserve.replicas.switching.wiring import Wiring


class Restore(Change[RestoreMet, Place | RestoreWave, Placed | RestoreDone]):
    """One member's part in a restore. It goes on alone, or in a narrower pipeline."""

    returns_weights = True
    rounds = (Place, RestoreWave)

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
        num_rows = self._narrower.host.num_rows if self._narrower is not None else 0
        return RestoreMet(num_rows=num_rows, num_host_rows=self._lane.host.num_host_rows)

    def move(self, met: Mapping[InstanceKey, RestoreMet], ask: Ask[Place | RestoreWave, Placed | RestoreDone]) -> None:
        """All members hear of the requests that go on, and of their blocks there, in the same order."""
        words_met = [met[key] for key in self._plan.members]
        own_rows = self._num_own_rows([word.num_host_rows for word in words_met])
        wave = self._assign(own_rows)
        num_rows = [word.num_rows for word in words_met]
        words = ask(Place(travellers=wave, num_rows=num_rows, num_own_rows=own_rows)).values()
        found = {t.request_id: t for word in words if isinstance(word, Placed) for t in word.travellers}
        placed = [found[traveller.request_id] for traveller in wave if traveller.request_id in found]
        ask(RestoreWave(travellers=placed))
        self._going = set(found)
        for rank, key in enumerate(self._plan.members):
            if rank != 0:
                self._member.owner.moved([t.request_id for t in placed if t.rank == rank], key, carried=True)

    def _num_own_rows(self, num_host_rows: list[int]) -> list[int]:
        """By rank, stage rows of the narrower pipeline that are free once the hosts keep only what travels."""
        lane = self._lane
        kept = lane.host.num_host_rows_of(row for request in lane.carriable() for row in lane.rows_of(request))
        sizes = [self._parts.sizes[self._parts.of(rank)] for rank in range(len(num_host_rows))]
        layers = self._parts.num_layers
        return [
            max(0, count - kept) * stage_rows_in_row(layers, stage_layers(layers, size)) if size > 1 else 0
            for count, size in zip(num_host_rows, sizes, strict=True)
        ]

    def _assign(self, own_rows: list[int]) -> list[Traveller]:
        """Each request goes where most blocks are left, then where most room is on the hosts of a narrower pipeline.

        What fits nowhere is resumed from its tokens.
        """
        lane, memory = self._lane, self._member.lanes.dp.memory
        assert memory is not None
        sizes = memory.layers.sizes
        alone = self._member.lanes.dp.capacity.num_blocks  # with a host tier, more than the device has
        free = [
            sizes.num_pipeline_blocks(stage_layers(sizes.num_layers, size)) if size > 1 else alone
            for size in self._parts.sizes
        ]
        found = [(request, self._member.owner.handoff(request)) for request in lane.carriable()]
        tokens = [request.num_computed_tokens for request, handoff in found if handoff is not None]
        firsts = [(self._parts.start(part), size) for part, size in enumerate(self._parts.sizes)]
        on_hosts = [min(own_rows[first : first + size]) for first, size in firsts]
        places = iter(place([(count, lane.blocks_needed(count)) for count in tokens], free, on_hosts=on_hosts))
        return [
            Traveller(
                request.request_id,
                self._parts.start(part),
                lane.block_ids(request.request_id),
                handoff,
                rows=lane.rows_of(request),
                is_parked=lane.is_parked(request),
            )
            for request, handoff in found
            if handoff is not None and (part := next(places)) is not None
        ]

    def take(self, message: Place | RestoreWave) -> Placed | RestoreDone:
        """Requests get blocks in this member's part; then their KV comes."""
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
            if self._narrower is not None and self._narrower.rows_of(request):
                self._narrower.keep_away(request, is_ordered=request.request_id in parked)
                continue
            self._next.settle(request)
            if request.request_id in parked:
                self._next.keep_parked(request)
        return RestoreDone()

    def _place(self, message: Place) -> list[Traveller]:
        """Where this member leads its part, gives the requests that come there blocks, or rows of the hosts; those that
        found room.

        From here on the blocks of `dp` are free: the lane that ends has given them back.
        """
        self._has_begun = True
        self._member.lanes.leases.return_all(self._lane)
        if (tiers := self._member.lanes.dp.tiers) is not None:
            tiers.forget_all()
        self._lane.host.keep_only([row for traveller in message.travellers for row in traveller.rows])
        if self._narrower is not None:
            part = slice(self._rank, self._rank + len(self._keys))
            self._narrower.host.may_swap(min(message.num_own_rows[part]), min(message.num_rows[part]))
        placed: list[Traveller] = []
        for traveller in message.travellers if self._keys[0] == self._member.key else []:
            client_index = self._member.owner.welcome(traveller.handoff) if traveller.rank == self._rank else None
            if client_index is None:
                continue
            request = revive(traveller.handoff, client_index)
            if (found := self._with_room(traveller, request)) is not None:
                self._taken.append(request)
                placed.append(found)
        return placed

    def _with_room(self, traveller: Traveller, request: Request) -> Traveller | None:
        """The traveller with its blocks in this part, or with its rows where the devices have none."""
        block_ids = self._next.admit(request, traveller.num_tokens)
        if block_ids is not None:
            return replace(traveller, part_ids=block_ids)
        rows = self._narrower.expect_parked(request, traveller.num_tokens) if self._narrower is not None else None
        return replace(traveller, host_rows=rows) if rows is not None else None

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
        every = range(1, lane.capacity.num_blocks + 1)
        lane.table.lease(every, every)
        lane.host.may_swap_all()
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
