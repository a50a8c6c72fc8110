"""Groups become one pipeline (KunServe sections 4.1, 4.2): instances alone, narrower pipelines, or both.

After the commit new requests run; those that ran before go on when their KV has come (`engine/movers/exchange.py`).
"""

from collections import Counter
from collections.abc import Mapping

from msgspec.structs import replace

from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.replicas.engine.groups.group_run import GroupRun
from pengserve.replicas.engine.lanes.handoff import revive
from pengserve.replicas.engine.movers.exchange import DropExchange
from pengserve.replicas.engine.movers.reshard import Traveller
from pengserve.replicas.switching.changes.change import Ask, Change
from pengserve.replicas.switching.changes.joining import brought, check_joining, send_rest
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.messages import DropDone, DropMet, DropWave
from pengserve.replicas.switching.running_group import RunningGroup
from pengserve.replicas.switching.wiring import Wiring


class Drop(Change[DropMet, DropWave, DropDone]):
    """One member's part in a drop."""

    rounds = (DropWave,)
    run: GroupRun

    def __init__(self, member: Member, wiring: Wiring, running_group: RunningGroup, plan: SwitchPlan) -> None:
        super().__init__(member, wiring, running_group, plan)
        self.run = self._new_run(plan.group, plan.members)
        self._lane = member.lanes.registry.pp(plan.group)
        self._exchange = DropExchange(member.lanes, self._lane, member.parts_of(plan))
        self._num_carried = self._num_left = 0

    @staticmethod
    def check(member: Member, wiring: Wiring, plan: SwitchPlan) -> None:
        check_joining(member, wiring, plan)

    def begin(self, kept: frozenset[str] | None) -> DropMet:
        # None pauses, also under hard: memory of `dp` is remapped.
        coming = brought(self._member, self._plan, kept, lambda request: False)
        return DropMet(travellers=coming, host_rows=self._lane.num_host_rows)

    def move(self, met: Mapping[InstanceKey, DropMet], ask: Ask[DropWave, DropDone]) -> None:
        """Moves memory in one round; KV follows beside the steps."""
        lane, words = self._lane, [met[key] for key in self._plan.members]
        lane.share_hosts(min(word.host_rows for word in words))
        coming = [traveller for word in words for traveller in word.travellers]
        num_free, wave = self._num_free(coming, [word.host_rows for word in words]), []
        for traveller in coming:
            needed = lane.blocks_needed(traveller.num_tokens)
            if needed <= num_free and (found := self._expect(traveller)) is not None:
                num_free -= needed
                wave.append(found)
        self._num_carried, self._num_left = len(wave), len(coming) - len(wave)
        done = ask(DropWave(travellers=wave, order=lane.withhold_free())).values()
        lane.offer(min(word.num_backed for word in done))
        lane.limit(min(word.num_columns for word in done) + 1)

    def _num_free(self, coming: list[Traveller], host_rows: list[int]) -> int:
        """Blocks that each member has places for, wherever those of its own part are while KV is exchanged."""
        parts, held = self._member.parts_of(self._plan), Counter[int]()
        for traveller in coming:
            held[parts.of(traveller.rank)] += self._lane.blocks_for(traveller.num_tokens)
        return min(self._lane.num_places(rank, rows - held[parts.of(rank)]) for rank, rows in enumerate(host_rows))

    def _expect(self, traveller: Traveller) -> Traveller | None:
        """The traveller with its blocks in the lane; None where it finds no room, or its ingress is gone."""
        client_index = self._member.owner.welcome(traveller.handoff)
        if client_index is None:
            return None
        request = revive(traveller.handoff, client_index)
        logical_ids = self._lane.expect(request, traveller.num_tokens, is_parked=traveller.is_parked)
        return replace(traveller, logical_ids=logical_ids) if logical_ids is not None else None

    def take(self, message: DropWave) -> DropDone:
        """Memory of weights becomes room for KV, and the leader takes over this member's requests."""
        reached("wave")
        num_backed, num_columns = self._exchange.begin(message.travellers, message.order)
        reached("waved")
        mine = [t.request_id for t in message.travellers if t.rank == self._lane.rank]
        self._member.lanes.current.release(mine)
        if not self._leads:
            self._member.owner.moved(mine, self._plan.leader, carried=True)
        return DropDone(num_backed=num_backed, num_columns=num_columns)

    def commit(self) -> SwitchReport:
        """What is left in the parts goes to the leader, from its tokens, and all blocks to the lane."""
        lanes = self._member.lanes
        num_redirected = self._leave_part()
        lanes.enter(self._lane, self.run)
        num_redirected += send_rest(self._member, self._plan.leader)
        lanes.leases.lend_all(self._lane)
        self._running_group.begin(self.run, self._exchange)
        return self._report(
            num_carried=self._num_carried,
            num_recomputed=self._num_left,
            num_redirected=num_redirected,
            carried_bytes=self._exchange.total_bytes,
        )

    def _leave_part(self) -> int:
        """Where this member ran in a narrower pipeline, that ends; how many requests were left in it."""
        lanes, lane = self._member.lanes, self._member.lanes.running
        if lane is None:
            return 0
        going = [request.request_id for request in lane.requests()] if lane.leads else []
        if lane.leads:
            lane.release(going)
        lane.forget(lane.known_ids())
        lane.table.release(lane.table.leased())
        lanes.leases.return_all(lane)
        lanes.leave()
        self._member.owner.moved(going, self._plan.leader, carried=False)
        return len(going)

    def undo(self) -> None:
        """KV is no longer where it was, so that all requests begin from their tokens."""
        lanes = self._member.lanes
        lost = [request.request_id for request in lanes.dp.requests()]
        lanes.dp.release(lost)
        if self._leads:
            lost += [request.request_id for request in self._lane.requests()]
        if lanes.running is not None and lanes.running is not self._lane:
            lost += lanes.abandon()
        lanes.discard(self._lane)
        if lanes.dp.tiers is not None:  # what stood still is all that it kept
            lanes.dp.tiers.forget_all()
            lanes.dp.reset_prefix_cache()
        self._member.owner.moved(list(dict.fromkeys(lost)), None, carried=False)
