"""The leader's side of switches: one at a time, from the controller's call to its report.

commit -> (drain, or weights come back) -> meet ~~ short steps until all have met ~~> move -> commit

What a switch does is its change's (`changes/`). Here is when: the same for all of them.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pengserve.planners.types.errors import EngineError, PengServeError, StepError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.replicas.engine.lanes.lane import Lane
from pengserve.replicas.switching.changes.change import Change
from pengserve.replicas.switching.changes.table import change_of
from pengserve.replicas.switching.conversation import Conversation, foreseen
from pengserve.replicas.switching.draining import Draining
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.messages import Commit, Drain, Meet, Met, Return
from pengserve.replicas.switching.prepared import Prepared
from pengserve.replicas.switching.running_group import RunningGroup
from pengserve.replicas.switching.step_thread import StepThread
from pengserve.replicas.switching.switch import Switch

_REPORTS_KEPT = 32
_ROOM_POLL_S = 0.02  # how often the leader of a restore looks whether requests have left the devices,
_ROOM_TIMEOUT_S = 10.0  # ... and for how long


class Leading:
    """Belongs to the step thread. `on_changed` is called after each end."""

    def __init__(
        self,
        member: Member,
        steps: StepThread,
        prepared: Prepared,
        running_group: RunningGroup,
        on_changed: Callable[[], None],
    ) -> None:
        self._member, self._steps, self._prepared = member, steps, prepared
        self._running_group, self._on_changed = running_group, on_changed
        self._reports: OrderedDict[str, SwitchReport] = OrderedDict()
        self._draining: Draining | None = None
        self._hastened: Lane | None = None  # whose steps are kept short
        self.switch: Switch | None = None  # under way

    def require_free(self) -> None:
        """Raises StepError where this member leads a switch already."""
        if self.switch is not None:
            raise StepError(f"instance {self._member.key} is in the middle of {self.switch.plan.plan_id}")

    def is_about(self, plan_id: str) -> bool:
        """Whether this plan is under way."""
        return self.switch is not None and self.switch.plan.plan_id == plan_id

    # From the call to the meeting -------------------------------------------------------------------------------------

    def begin(self, plan: SwitchPlan) -> SwitchReport | Switch:
        """Begins a prepared plan, or says how far it is; its report where it has ended.

        Raises:
            StepError: it cannot begin.
        """
        if plan.plan_id in self._reports:
            return self._reports[plan.plan_id]
        if self.switch is not None and self.is_about(plan.plan_id):
            return self.switch
        if plan.plan_id not in self._prepared:
            raise StepError(f"instance {self._member.key} has not prepared {plan.plan_id}")
        self.require_free()
        self._prepared.check(plan)
        reached("begun")
        switch = self.switch = Switch(plan, self._running_group.led_here)
        try:
            if change_of(plan).returns_weights:
                self._make_room(switch, time.monotonic() + _ROOM_TIMEOUT_S)
            elif plan.drains:
                self._drain(switch)
            else:
                self._meet(switch)
        except PengServeError as error:
            self.fail(error)
        return switch

    def _make_room(self, switch: Switch, until_s: float) -> None:
        """Weights come back as soon as the blocks that they need are free."""
        if self._running_group.pipeline.makes_room(switch.plan) and time.monotonic() < until_s:
            self._steps.after(_ROOM_POLL_S, lambda: self._make_room_now(switch, until_s))
        else:
            self._return_weights(switch)

    def _make_room_now(self, switch: Switch, until_s: float) -> None:
        if self.switch is switch:
            try:
                self._make_room(switch, until_s)
            except PengServeError as error:
                self.fail(error)

    def _return_weights(self, switch: Switch) -> None:
        """Weights come back beside the steps; the members meet when they are there."""
        plan, talk = switch.plan, Conversation(self._member, switch.plan)
        self._running_group.pipeline.lead_return(
            plan,
            lambda withheld: talk.tell_all(Return(plan=plan, withheld=withheld)),
            lambda: self._steps.submit(lambda: self._meet_now(switch)),
        )
        self._steps.after(plan.drain_timeout_s, lambda: self._return_timeout(switch))

    def _return_timeout(self, switch: Switch) -> None:
        if self.switch is switch and not switch.is_meeting:
            self.fail(StepError(f"the weights were not back within {switch.plan.drain_timeout_s:g} s"))

    def _drain(self, switch: Switch) -> None:
        plan, talk, own = switch.plan, Conversation(self._member, switch.plan), self._member.key
        for key in switch.part_leaders:
            talk.say(key, Drain(plan=plan))
        self._draining = Draining(self._member.lanes.current, plan, lambda: self.on_drained(plan.plan_id, own))
        self._draining.check()
        reached("draining")
        self._steps.after(plan.drain_timeout_s, lambda: self._meet_now(switch))

    def on_drained(self, plan_id: str, key: InstanceKey) -> None:
        """A member's running requests have ended."""
        switch = self.switch
        if switch is None or not self.is_about(plan_id):
            return
        switch.drained.add(key)
        if switch.drained.issuperset((self._member.key, *switch.part_leaders)):
            # Not from within a step's callbacks: the next boundary is soon enough.
            self._steps.submit(lambda: self._meet_now(switch))

    def _end_draining(self) -> frozenset[str] | None:
        draining, self._draining = self._draining, None
        return draining.end() if draining is not None else None

    # The meeting ------------------------------------------------------------------------------------------------------

    def _meet_now(self, switch: Switch) -> None:
        if self.switch is switch and not switch.is_meeting:
            try:
                self._meet(switch)
            except PengServeError as error:
                self.fail(error)

    def _meet(self, switch: Switch) -> None:
        """The other parts stop at their next step boundary. This member goes on in short steps until they have."""
        self._prepared.check(switch.plan)
        switch.meet()
        self._hasten(self._member.lanes.current)
        self._ask_to_meet(switch, switch.part_leaders, switch.others)
        self._advance(switch)

    def _hasten(self, lane: Lane | None) -> None:
        """The steps of `lane` are kept short from now on, and of no other."""
        before, self._hastened = self._hastened, lane
        for one, is_on in ((before, False), (lane, True)):
            if one is not None:
                one.keep_steps_short(is_on)

    def _ask_to_meet(self, switch: Switch, told: tuple[InstanceKey, ...], due: tuple[InstanceKey, ...]) -> None:
        """Those that are told see to it that all that are due stop."""
        if not told:
            return
        for key in told:
            Conversation(self._member, switch.plan).say(key, Meet(plan=switch.plan))
        reached("meeting")
        self._steps.after(self._member.timeout_s, lambda: self._meet_timeout(switch, due))

    def _meet_timeout(self, switch: Switch, due: tuple[InstanceKey, ...]) -> None:
        missing = [str(key) for key in due if key not in switch.met]
        if self.switch is switch and missing:
            self.fail(StepError(f"instances {', '.join(missing)} did not meet within {self._member.timeout_s:g} s"))

    def on_met(self, key: InstanceKey, plan_id: str, word: Met) -> None:
        """A member has stopped at a step boundary."""
        if self.switch is not None and self.is_about(plan_id):
            self.switch.met[key] = word
            self._advance(self.switch)

    def boundary(self) -> None:
        """After each step."""
        if self.switch is not None and self.switch.is_meeting:
            self._advance(self.switch)
        if self._draining is not None:
            self._draining.check()

    def _advance(self, switch: Switch) -> None:
        """When the other parts have stopped, the group that is led here stops too; when all have, they move."""
        if not switch.have_met(switch.others):
            return
        if switch.own and not switch.has_told_own:
            if not self._running_group.stop():
                return
            switch.has_told_own = True
            try:
                self._ask_to_meet(switch, switch.own, switch.own)
            except PengServeError as error:
                self.fail(error)
                return
        if switch.have_met(switch.plan.members[1:]):
            self._carry_out(switch)

    # From the meeting to the end --------------------------------------------------------------------------------------

    def _carry_out(self, switch: Switch) -> None:
        """All members stand still."""
        plan, own, talk = switch.plan, self._member.key, Conversation(self._member, switch.plan)
        met_s, kept = time.perf_counter(), self._end_draining()
        self._hasten(None)
        try:
            talk.catch_up()
            change = self._prepared.change(plan)
            met = {own: change.begin(kept), **switch.met}
        except Exception as error:
            self.fail(foreseen(plan, error))
            return
        try:
            change.move(met, partial(self._ask, talk, change))
            reached("committing")
            talk.tell_all(Commit())
            reached("committed")
            report = change.commit()
        except Exception as error:
            talk.cancel(str(error))
            failure = EngineError(f"the {plan.verb} failed half-way ({foreseen(plan, error)}); all members are in dp")
            change.fail(failure, has_begun=True)
            self.fail(failure)
            return
        cutover_s, meet_s = time.perf_counter() - met_s, met_s - switch.started_s
        self._succeed(switch, replace(report, drain_s=switch.drain_s, meet_s=meet_s, cutover_s=cutover_s))

    def _ask(self, talk: Conversation, change: Change[Any, Any, Any], message: Any) -> Mapping[InstanceKey, Any]:
        """One round: every member takes part, and says what has become of it. The others answer with the same word."""
        talk.tell_all(message)
        answer = change.take(message)
        return {self._member.key: answer, **talk.gather(type(answer))}

    def _succeed(self, switch: Switch, report: SwitchReport) -> None:
        self._reports[report.plan_id] = report
        while len(self._reports) > _REPORTS_KEPT:
            self._reports.popitem(last=False)
        self.switch = None
        self._prepared.committed(switch.plan)
        self._on_changed()
        switch.outcome.set_result(report)

    def fail(self, error: BaseException) -> None:
        """What is under way ends here: all is as it was, or this member is in dp already."""
        switch, self.switch = self.switch, None
        self._end_draining()
        self._hasten(None)
        self._running_group.go_on()
        if switch is not None:
            self._running_group.pipeline.undo_return(switch.plan.plan_id)
            Conversation(self._member, switch.plan).cancel(str(error))
            self._prepared.forget(switch.plan.plan_id)
            switch.outcome.set_exception(error)
        self._on_changed()
