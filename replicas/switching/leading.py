"""The leader's side of switches: one commit at a time, from the controller's call to its report.

commit -> (drain) -> meet ~~ goes on stepping until all have met ~~> move requests -> commit
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

from pengserve.planners.types.errors import EngineError, PengServeError, StepError
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.layout import GroupKind
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.tp_lane import TpLane
from pengserve.replicas.switching.commit import Commit, drains, is_restore
from pengserve.replicas.switching.draining import Drain
from pengserve.replicas.switching.dropping import LeaderDrop
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Conversation, Member, empty_inbox, parts_of
from pengserve.replicas.switching.merging import LeaderMerge, travellers
from pengserve.replicas.switching.messages import MessageKind, SwitchMessage
from pengserve.replicas.switching.pipeline import OnBroken
from pengserve.replicas.switching.prepared import Prepared
from pengserve.replicas.switching.restore_target import RestoreTarget
from pengserve.replicas.switching.restoring import LeaderRestore
from pengserve.replicas.switching.running_group import RunningGroup, end_group
from pengserve.replicas.switching.splitting import LeaderSplit
from pengserve.replicas.switching.step_thread import StepThread
from pengserve.replicas.switching.wiring import Wiring

logger = logging.getLogger(__name__)

_REPORTS_KEPT = 32


class Leading:
    """Belongs to the step thread. `on_changed` is called after each end, `on_broken` where the group cannot go on."""

    def __init__(
        self,
        member: Member,
        wiring: Wiring,
        steps: StepThread,
        prepared: Prepared,
        running_group: RunningGroup,
        on_changed: Callable[[], None],
        on_broken: OnBroken,
    ) -> None:
        self._member, self._wiring, self._steps = member, wiring, steps
        self._prepared, self._running_group = prepared, running_group
        self._on_changed, self._on_broken = on_changed, on_broken
        self._reports: OrderedDict[str, SwitchReport] = OrderedDict()
        self._drain: Drain | None = None
        self.commit: Commit | None = None  # under way

    def check(self, plan: SwitchPlan) -> None:
        """As `Prepared.check`, and that nothing else is under way."""
        if self.commit is not None:
            raise StepError(f"instance {self._member.key} is in the middle of {self.commit.plan.plan_id}")
        self._prepared.check(plan)

    def awaits_met(self, plan_id: str) -> bool:
        """Whether members meet for this merge. From any thread."""
        commit = self.commit
        return commit is not None and commit.plan.is_merge and commit.plan.plan_id == plan_id

    def is_about(self, plan_id: str) -> bool:
        """Whether this plan is under way."""
        return self.commit is not None and self.commit.plan.plan_id == plan_id

    # From the call to the meeting -------------------------------------------------------------------------------------

    def begin(self, plan: SwitchPlan) -> SwitchReport | Commit:
        """Begins a prepared plan, or says how far it is; its report where it has ended.

        Raises:
            StepError: it cannot begin.
        """
        if plan.plan_id in self._reports:
            return self._reports[plan.plan_id]
        if self.commit is not None and self.is_about(plan.plan_id):
            return self.commit
        if plan.plan_id not in self._prepared:
            raise StepError(f"instance {self._member.key} has not prepared {plan.plan_id}")
        self.check(plan)
        reached("begun")
        commit = self.commit = Commit(plan)
        try:
            if is_restore(plan):
                self._start_return(commit)
            elif drains(plan):
                self._start_drain(commit)
            else:
                self._meet(commit)
        except PengServeError as error:
            self.fail(error)
        return commit

    def _start_return(self, commit: Commit) -> None:
        """Restore: weights come back beside the steps; the members meet when they are there."""
        plan, lane = commit.plan, self._member.lanes.running
        assert isinstance(lane, PpLane)
        withheld = lane.give_up_blocks(parts_of(self._member, plan))
        try:
            Conversation(self._member, plan).tell_all(MessageKind.RETURN, plan=plan, lease=withheld)
            reached("returning")
            meet = partial(self._steps.submit, lambda: self._meet_now(commit))
            self._running_group.pipeline.begin_return(lane, plan, withheld, meet)
        except PengServeError:
            lane.offer_all()
            raise
        self._steps.after(plan.drain_timeout_s, lambda: self._return_timeout(commit))

    def _return_timeout(self, commit: Commit) -> None:
        if self.commit is commit and not commit.is_meeting:
            self.fail(StepError(f"the weights were not back within {commit.plan.drain_timeout_s:g} s"))

    def _start_drain(self, commit: Commit) -> None:
        plan = commit.plan
        if plan.is_merge:
            Conversation(self._member, plan).tell_all(MessageKind.DRAIN, plan=plan)
        self._drain = Drain(self._member.lanes.current, plan, lambda: self.on_drained(plan.plan_id, self._member.key))
        self._drain.check()
        reached("draining")
        self._steps.after(plan.drain_timeout_s, lambda: self._meet_now(commit))

    def on_drained(self, plan_id: str, key: InstanceKey) -> None:
        """A member's running requests have ended."""
        commit = self.commit
        if commit is None or not self.is_about(plan_id):
            return
        commit.drained.add(key)
        if not commit.plan.is_merge or len(commit.drained) == len(commit.plan.members):
            # Not from within a step's callbacks: the next boundary is soon enough.
            self._steps.submit(lambda: self._meet_now(commit))

    def _end_drain(self) -> frozenset[str] | None:
        drain, self._drain = self._drain, None
        return drain.end() if drain is not None else None

    def _meet_now(self, commit: Commit) -> None:
        if self.commit is commit and not commit.is_meeting:
            commit.drain_s = time.perf_counter() - commit.started_s
            try:
                self._meet(commit)
            except PengServeError as error:
                self.fail(error)

    def _meet(self, commit: Commit) -> None:
        """Asks the others to stop at their next step boundary. This member goes on stepping until all have."""
        commit.is_meeting = True
        commit.started_s = time.perf_counter()
        if not commit.plan.is_merge:
            self._split_when_empty(commit)
            return
        plan, talk = commit.plan, Conversation(self._member, commit.plan)
        for part in plan.parts[1:]:
            # It tells its own followers, after its last step.
            talk.say(plan.keys(part)[0], MessageKind.MEET, plan=plan)
        reached("meeting")
        self._steps.after(self._member.timeout_s, lambda: self._meet_timeout(commit))

    def _meet_timeout(self, commit: Commit) -> None:
        if self.commit is commit:
            missing = [str(key) for key in commit.plan.members[1:] if key not in commit.met]
            self.fail(StepError(f"instances {', '.join(missing)} did not meet within {self._member.timeout_s:g} s"))

    def on_met(self, key: InstanceKey, message: SwitchMessage) -> None:
        """Merge: a member has stopped at a step boundary."""
        commit = self.commit
        if commit is None or not self.is_about(message.plan_id):
            return
        commit.met[key] = message
        self._merge_when_met(commit)

    def _merge_when_met(self, commit: Commit) -> None:
        """When the other parts have stopped, the pipeline that this member leads does, if it is in one: it finishes
        what is in it first, see `boundary`.
        """
        plan, lane = commit.plan, self._member.lanes.running
        own = plan.keys(plan.parts[0])
        if not commit.have_met(key for key in plan.members if key not in own):
            return
        if isinstance(lane, PpLane) and not commit.has_told_own:
            lane.hold(True)
            if lane.num_in_flight:
                return
            commit.has_told_own = True
            try:
                for key in own[1:]:
                    Conversation(self._member, plan).say(key, MessageKind.MEET, plan=plan)
            except PengServeError as error:
                self.fail(error)
                return
        if commit.have_met(plan.members[1:]):
            self._merge(commit)

    def boundary(self) -> None:
        """After each step."""
        commit = self.commit
        if commit is not None and commit.is_meeting:
            if commit.plan.is_merge:
                self._merge_when_met(commit)
            else:
                self._split_when_empty(commit)
        if self._drain is not None:
            self._drain.check()

    # Merge and drop ---------------------------------------------------------------------------------------------------

    def _merge(self, commit: Commit) -> None:
        plan, member = commit.plan, self._member
        empty_inbox(member, plan)
        meet_s = time.perf_counter() - commit.started_s
        talk = Conversation(member, plan)
        kept = self._end_drain()
        try:
            name = self._wiring.spec(plan).name
            kind = LeaderDrop if plan.group.kind is GroupKind.PP else LeaderMerge
            merge = kind(talk, name, Epoch(plan.epoch + 1))
        except PengServeError as error:  # the group broke while its members met
            self.fail(error)
            return
        try:
            report = merge.run(commit.met, travellers(member, plan, kept))
        except Exception as error:
            if not isinstance(error, PengServeError):
                logger.exception("the merge %s failed", plan.plan_id)
            talk.cancel(str(error))
            merge.undo()
            self._running_group.end_if_gone()
            end_group(member, name, plan.members)
            self.fail(EngineError(f"the merge failed half-way ({error}); all members are in dp"))
            return
        self._running_group.begin(name, plan.members, merge.exchange if isinstance(merge, LeaderDrop) else None)
        self._succeed(commit, report, meet_s)

    # Split and restore ------------------------------------------------------------------------------------------------

    def _split_when_empty(self, commit: Commit) -> None:
        """Begins the split. A pipeline first finishes its microbatches, and `boundary` calls this again."""
        lane = self._member.lanes.running
        if isinstance(lane, PpLane):
            lane.hold(True)
            if lane.num_in_flight:
                return
        self._split(commit)

    def _split(self, commit: Commit) -> None:
        plan, member = commit.plan, self._member
        lane = member.lanes.running
        assert lane is not None
        self._end_drain()
        talk = Conversation(member, plan)
        target, has_begun = None, False
        try:
            self._prepared.check(plan)
            if isinstance(lane, PpLane):
                target = RestoreTarget(member, self._wiring, plan)
            empty_inbox(member, plan)
            has_begun = True
            talk.tell_all(MessageKind.MEET, plan=plan)
            reached("meeting")
            met = talk.gather(MessageKind.MET)
            meet_s = time.perf_counter() - commit.started_s
            epoch = Epoch(plan.epoch + 1)
            if isinstance(lane, PpLane):
                assert target is not None
                report = LeaderRestore(talk, lane, target, self._running_group.name, epoch).run()
            else:
                report = LeaderSplit(talk, cast(TpLane, lane), self._running_group.name, epoch).run(met)
        except Exception as error:
            if not isinstance(error, PengServeError):
                logger.exception("the split %s failed", plan.plan_id)
            talk.cancel(str(error))
            failure = error if isinstance(error, PengServeError) else EngineError(f"the split failed: {error}")
            if has_begun:
                self._on_broken(failure)
                if target is not None:
                    target.tell_broken()
            self.fail(failure)
            return
        if target is not None:
            target.show_in(self._running_group)
        else:
            self._running_group.end()
        self._succeed(commit, report, meet_s)

    # The end ----------------------------------------------------------------------------------------------------------

    def _succeed(self, commit: Commit, report: SwitchReport, meet_s: float) -> None:
        report = replace(report, drain_s=commit.drain_s, meet_s=meet_s)
        self._reports[report.plan_id] = report
        while len(self._reports) > _REPORTS_KEPT:
            self._reports.popitem(last=False)
        self.commit = None
        self._prepared.epoch = report.epoch
        self._prepared.forget(report.plan_id)
        self._on_changed()
        commit.outcome.set_result(report)

    def fail(self, error: BaseException) -> None:
        """What is under way ends here: all is as it was, or this member is in dp already."""
        commit, self.commit = self.commit, None
        self._end_drain()
        lane = self._member.lanes.running
        if isinstance(lane, PpLane):
            lane.hold(False)
            self._running_group.pipeline.undo_return(lane)
        if commit is not None:
            Conversation(self._member, commit.plan).cancel(str(error))
            self._prepared.forget(commit.plan.plan_id)
            commit.outcome.set_exception(error)
        self._on_changed()
