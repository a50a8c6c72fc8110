"""Where a member goes on after a restore: alone, or in a narrower pipeline. It takes the requests that come there."""

from msgspec.structs import replace

from pengserve.planners.types.layout import GroupKind
from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.engine.dp_lane import DpLane
from pengserve.replicas.engine.handoff import revive
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.reshard import Traveller
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.merging import seed_of, settle_rest
from pengserve.replicas.switching.running_group import RunningGroup, tell_broken
from pengserve.replicas.switching.wiring import Wiring


class RestoreTarget:
    """One member's side of one restore. Belongs to the step thread."""

    def __init__(self, member: Member, wiring: Wiring, plan: SwitchPlan) -> None:
        """Changes nothing.

        Raises:
            StepError: there is no lane for the pipeline.
            EngineError: its communicators are not ready.
        """
        self._member, self._plan = member, plan
        part = plan.part_of(member.key)
        self._keys = plan.keys(part)
        self._rank = plan.members.index(self._keys[0])  # of the part's leader, in the group that ends
        self._lane: DpLane | PpLane = member.lanes.dp
        self._name, self._communicator = "", None
        if part.kind is GroupKind.PP:
            self._lane = member.lanes.pp(part)
            self._name = wiring.spec_of(part, self._keys).name
            self._communicator = member.pool.get(self._name)
        self._taken: list[Request] = []
        self._has_begun = False

    def place(self, wave: list[Traveller]) -> list[Traveller]:
        """Gives the requests that come to this part blocks there, if this member leads it; those that found room.

        From here on the blocks of `dp` are free: the lane that ends has given them back.
        """
        running = self._member.lanes.running
        assert running is not None
        self._has_begun = True
        self._member.lanes.return_all(running)
        placed: list[Traveller] = []
        for traveller in wave if self._keys[0] == self._member.key else []:
            client_index = self._member.owner.welcome(traveller.handoff) if traveller.rank == self._rank else None
            if client_index is None:
                continue
            request = revive(traveller.handoff, client_index)
            block_ids = self._lane.admit(request, traveller.num_tokens)
            if block_ids is not None:
                self._taken.append(request)
                placed.append(replace(traveller, part_ids=block_ids))
        return placed

    def settle(self, wave: list[Traveller]) -> None:
        """The KV of `wave` is where `place` said."""
        if self._keys[0] != self._member.key:
            for traveller in wave:
                if traveller.rank == self._rank:
                    self._lane.adopt(revive(traveller.handoff, 0))
        for request in self._taken:
            self._lane.adopt(request)
            self._lane.settle(request)

    def undo(self) -> None:
        """The restore failed half-way: all members will be in dp, and what came here begins from its tokens."""
        if not self._has_begun:
            return
        ids = [request.request_id for request in self._taken]
        if isinstance(self._lane, PpLane):
            self._member.lanes.discard(self._lane)
        else:
            self._lane.release(ids)
        self._member.owner.moved(ids, None, carried=False)

    def enter(self) -> None:
        """After the commit: this member leaves the group that ends, and runs in its part."""
        lanes, lane = self._member.lanes, self._lane
        running = lanes.running
        assert running is not None
        running.forget(running.known_ids())
        running.table.release(running.table.leased())
        lanes.leave()
        if not isinstance(lane, PpLane):
            return
        assert self._communicator is not None
        every = range(1, lane.capacity.num_blocks + 1)
        lane.table.lease(every, every)
        lane.followers = self._keys[1:]
        lane.is_settled, lane.is_exchanging = True, False
        lanes.enter(lane, seed_of(self._plan), self._communicator)
        settle_rest(self._member, self._plan, self._keys[0])
        lanes.lend_all(lane)

    def show_in(self, running_group: RunningGroup) -> None:
        """Says which group this member runs in now."""
        if self._name:
            running_group.begin(self._name, self._keys)
        else:
            running_group.end()

    def tell_broken(self) -> None:
        """The restore failed on this member. The others of its part may have entered the part, and must leave it."""
        if self._name:
            tell_broken(self._member, self._name, self._keys)
