"""A follower's side of switches: it drains, stops at a step boundary, moves requests, and changes with the leader.

(drain, or weights come back) -> meet: stop at a step boundary -> move -> commit
"""

import contextlib
from collections.abc import Callable

from pengserve.planners.types.errors import LinkLostError, PengServeError, StepError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.switching.conversation import CalledOff, Conversation, foreseen
from pengserve.replicas.switching.draining import Draining
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.messages import Commit, Drained, Meet
from pengserve.replicas.switching.prepared import Prepared
from pengserve.replicas.switching.running_group import RunningGroup
from pengserve.replicas.switching.step_thread import StepThread


class Following:
    """Belongs to the step thread. `require_free` raises where this member leads a switch itself."""

    def __init__(
        self,
        member: Member,
        steps: StepThread,
        prepared: Prepared,
        running_group: RunningGroup,
        require_free: Callable[[], None],
        on_changed: Callable[[], None],
    ) -> None:
        self._member, self._steps, self._prepared = member, steps, prepared
        self._running_group, self._require_free, self._on_changed = running_group, require_free, on_changed
        self._draining: Draining | None = None
        self._joining: SwitchPlan | None = None  # waits until the pipeline that this member leads is empty

    # Before the meeting -----------------------------------------------------------------------------------------------

    def drain(self, leader: InstanceKey, plan: SwitchPlan) -> None:
        """Lets running requests end, and then tells the leader."""
        talk = Conversation(self._member, plan)
        try:
            self._require_prepared(plan)
        except StepError as error:
            talk.cancel(str(error))
            return

        def drained() -> None:
            with contextlib.suppress(LinkLostError):  # `lost` calls the drain off
                talk.say(leader, Drained())

        self._draining = draining = Draining(self._member.lanes.current, plan, drained)
        draining.check()
        reached("draining")
        # The leader may die while this member pauses new requests for it.
        timeout_s = plan.drain_timeout_s + 2 * self._member.timeout_s
        self._steps.after(timeout_s, lambda: self._draining is draining and self._end_draining())

    def bring_back(self, plan: SwitchPlan, withheld: list[int]) -> None:
        """Restore: weights come back beside the steps."""
        try:
            self._require_prepared(plan)
            reached("returning")
            self._running_group.pipeline.begin_return(plan, withheld)
        except PengServeError as error:
            Conversation(self._member, plan).cancel(str(error))

    def call_off(self, key: InstanceKey, plan_id: str) -> None:
        """Instance `key` has called the plan off: this member's drain for it ends, and its wait to join.

        Where `key` leads the running pipeline, a return of weights ends too.
        """
        if self._joining is not None and self._joining.plan_id == plan_id:
            self._end_joining()
        if self._draining is not None and self._draining.plan.plan_id == plan_id:
            self._end_draining()
        if key == self._running_group.leader:
            self._running_group.pipeline.undo_return(plan_id)

    def lost(self, key: InstanceKey) -> None:
        """A peer is gone."""
        if self._joining is not None and key in self._joining.members:
            self._end_joining()
        if self._draining is not None and key in self._draining.plan.members:
            self._end_draining()

    def boundary(self) -> None:
        """After each step."""
        if self._draining is not None:
            self._draining.check()
        if self._joining is not None:
            self.join(self._joining)

    def _require_prepared(self, plan: SwitchPlan) -> None:
        if plan.plan_id not in self._prepared:
            raise StepError(f"it has not prepared {plan.plan_id}")

    def _end_joining(self) -> None:
        """The group that this member leads goes on, where there is one still."""
        self._joining = None
        self._running_group.go_on()

    def _end_draining(self) -> frozenset[str] | None:
        draining, self._draining = self._draining, None
        return draining.end() if draining is not None else None

    # The meeting ------------------------------------------------------------------------------------------------------

    def join(self, plan: SwitchPlan) -> None:
        """Between two steps: from here to the commit this member does nothing else.

        Where it leads a pipeline, that first finishes what is in it, and then its followers join too.
        """
        if self._running_group.led_here and not self._running_group.stop():
            self._joining = plan
            return
        self._join(plan)
        self._end_joining()

    def _join(self, plan: SwitchPlan) -> None:
        reached("meeting")
        talk, kept = Conversation(self._member, plan), self._end_draining()
        change, has_begun = None, False
        try:
            talk.catch_up()
            self._require_prepared(plan)
            self._require_free()
            change = self._prepared.change(plan)
            for key in self._running_group.led_here:
                talk.say(key, Meet(plan=plan))
            talk.say(plan.leader, change.begin(kept))
            reached("met")
            while not isinstance(word := talk.hear(Commit, *change.rounds)[1], Commit):
                has_begun = True
                talk.say(plan.leader, change.take(word))
            has_begun = True
            reached("committed")
            change.commit()
        except Exception as error:
            failure = foreseen(plan, error)
            talk.cancel(str(failure))
            # Where it was called off before the first round, all members go on as they were. Else some may not have
            # heard that this one does not take part.
            if change is not None and (has_begun or not isinstance(failure, CalledOff)):
                change.fail(failure, has_begun=has_begun)
            self._on_changed()
            return
        self._prepared.committed(plan)
        self._on_changed()
