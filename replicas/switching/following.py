"""A follower's side of switches: it drains, stops at a step boundary, moves requests, and changes with the leader.

(drain) -> meet: stop at a step boundary -> move requests -> commit
"""

import contextlib
import logging
from collections.abc import Callable
from typing import cast

from pengserve.planners.types.errors import LinkLostError, PengServeError, StepError
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.layout import GroupKind
from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.tp_lane import TpLane
from pengserve.replicas.switching.draining import Drain
from pengserve.replicas.switching.dropping import join_drop
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Conversation, Member, empty_inbox
from pengserve.replicas.switching.merging import join_merge, travellers
from pengserve.replicas.switching.messages import MessageKind
from pengserve.replicas.switching.pipeline import OnBroken
from pengserve.replicas.switching.prepared import Prepared
from pengserve.replicas.switching.restore_target import RestoreTarget
from pengserve.replicas.switching.restoring import join_restore
from pengserve.replicas.switching.running_group import RunningGroup, tell_broken
from pengserve.replicas.switching.splitting import join_split
from pengserve.replicas.switching.step_thread import StepThread
from pengserve.replicas.switching.wiring import Wiring

logger = logging.getLogger(__name__)


class Following:
    """Belongs to the step thread. `check` says whether a plan can be joined now."""

    def __init__(
        self,
        member: Member,
        wiring: Wiring,
        steps: StepThread,
        prepared: Prepared,
        running_group: RunningGroup,
        check: Callable[[SwitchPlan], None],
        on_changed: Callable[[], None],
        on_broken: OnBroken,
    ) -> None:
        self._member, self._wiring, self._steps = member, wiring, steps
        self._prepared, self._running_group, self._check = prepared, running_group, check
        self._on_changed, self._on_broken = on_changed, on_broken
        self._drain: Drain | None = None
        self._joining: SwitchPlan | None = None  # waits until the pipeline that this member leads is empty

    # Before the meeting -----------------------------------------------------------------------------------------------

    def drain(self, leader: InstanceKey, plan: SwitchPlan) -> None:
        """Lets running requests end, and then tells the leader."""
        talk = Conversation(self._member, plan)
        if plan.plan_id not in self._prepared:
            talk.cancel(f"it has not prepared {plan.plan_id}")
            return

        def drained() -> None:
            with contextlib.suppress(LinkLostError):  # `lost` calls the drain off
                talk.say(leader, MessageKind.DRAINED)

        self._drain = drain = Drain(self._member.lanes.current, plan, drained)
        drain.check()
        reached("draining")
        # The leader may die while this member pauses new requests for it.
        timeout_s = plan.drain_timeout_s + 2 * self._member.timeout_s
        self._steps.after(timeout_s, lambda: self._drain is drain and self._end_drain())

    def bring_back(self, plan: SwitchPlan, withheld: list[int]) -> None:
        """Restore: weights come back beside the steps."""
        talk, lane = Conversation(self._member, plan), self._member.lanes.running
        try:
            if plan.plan_id not in self._prepared or not isinstance(lane, PpLane):
                raise StepError(f"it has not prepared {plan.plan_id}")
            reached("returning")
            self._running_group.pipeline.begin_return(lane, plan, withheld)
        except PengServeError as error:
            talk.cancel(str(error))

    def call_off(self, key: InstanceKey, plan_id: str) -> None:
        """Instance `key` has cancelled the plan: this member's drain for it ends, and its wait to join.

        Where `key` leads the running pipeline, a return of weights ends too.
        """
        if self._joining is not None and self._joining.plan_id == plan_id:
            self._end_joining()
        if self._drain is not None and self._drain.plan.plan_id == plan_id:
            self._end_drain()
        lane = self._member.lanes.running
        if isinstance(lane, PpLane) and lane.rank != 0 and key == self._running_group.leader:
            self._running_group.pipeline.undo_return(lane)

    def lost(self, key: InstanceKey) -> None:
        """A peer is gone."""
        if self._joining is not None and key in self._joining.members:
            self._end_joining()
        if self._drain is not None and key in self._drain.plan.members:
            self._end_drain()

    def boundary(self) -> None:
        """After each step."""
        if self._drain is not None:
            self._drain.check()
        if self._joining is not None:
            self.join(self._joining)

    def _end_joining(self) -> None:
        """The pipeline that this member leads goes on."""
        self._joining, lane = None, self._member.lanes.running
        if isinstance(lane, PpLane) and lane.rank == 0:
            lane.hold(False)

    def _end_drain(self) -> frozenset[str] | None:
        drain, self._drain = self._drain, None
        return drain.end() if drain is not None else None

    # The meeting ------------------------------------------------------------------------------------------------------

    def join(self, plan: SwitchPlan) -> None:
        """Between two steps: from here to the commit this member does nothing else.

        Where it leads a pipeline, that first finishes what is in it, and then its followers join too.
        """
        lane = self._member.lanes.running
        if plan.is_merge and isinstance(lane, PpLane) and lane.rank == 0:
            lane.hold(True)
            if lane.num_in_flight:
                self._joining = plan
                return
        self._join(plan)
        self._end_joining()

    def _join(self, plan: SwitchPlan) -> None:
        reached("meeting")
        talk = Conversation(self._member, plan)
        kept = self._end_drain()
        empty_inbox(self._member, plan)
        lane = self._member.lanes.running
        try:
            if plan.plan_id not in self._prepared:
                raise StepError(f"it has not prepared {plan.plan_id}")
            self._check(plan)
            if plan.is_merge:
                self._merge(talk, kept)
            else:
                self._split(talk)
        except Exception as error:
            if not isinstance(error, PengServeError):
                logger.exception("the switch %s failed here", plan.plan_id)
            talk.cancel(str(error))
            if plan.is_merge:
                self._running_group.end_if_gone()
                self._tell_broken(plan)  # the others may have gone on without this one
            elif lane is not None and lane.name == str(plan.group):
                self._on_broken(error)
            self._on_changed()
            return
        self._prepared.epoch = Epoch(plan.epoch + 1)
        self._prepared.forget(plan.plan_id)
        self._on_changed()

    def _merge(self, talk: Conversation, kept: frozenset[str] | None) -> None:
        plan, name = talk.plan, self._wiring.spec(talk.plan).name
        part = plan.keys(plan.part_of(self._member.key))
        if part[0] == self._member.key:
            for key in part[1:]:
                talk.say(key, MessageKind.MEET, plan=plan)
        own = travellers(self._member, plan, kept)
        if plan.group.kind is GroupKind.PP:
            self._running_group.begin(name, plan.members, join_drop(talk, name, own))
        else:
            join_merge(talk, name, own)
            self._running_group.begin(name, plan.members)

    def _split(self, talk: Conversation) -> None:
        lane = self._member.lanes.running
        if not isinstance(lane, PpLane):
            join_split(talk, cast(TpLane, lane), self._running_group.name)
            self._running_group.end()
            return
        target = RestoreTarget(self._member, self._wiring, talk.plan)
        try:
            join_restore(talk, lane, target, self._running_group.name)
        except Exception:
            target.tell_broken()
            raise
        target.show_in(self._running_group)

    def _tell_broken(self, plan: SwitchPlan) -> None:
        with contextlib.suppress(StepError):  # a group that no directory lists has no members that run it
            tell_broken(self._member, self._wiring.spec(plan).name, plan.members)
