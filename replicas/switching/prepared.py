"""Plans that this member has prepared and that are not committed, called off or forgotten yet."""

import time
from typing import Any

from pengserve.planners.types.errors import FenceError
from pengserve.planners.types.ids import Epoch
from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.switching.changes.change import Change
from pengserve.replicas.switching.changes.table import change_of
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.running_group import RunningGroup
from pengserve.replicas.switching.wiring import Wiring

PREPARED_S = 60.0  # a member forgets a prepared plan that its leader has not committed by then


class Prepared:
    """Belongs to the step thread."""

    def __init__(self, member: Member, wiring: Wiring, running_group: RunningGroup) -> None:
        self._member, self._wiring, self._running_group = member, wiring, running_group
        self._until_s: dict[str, float] = {}  # by plan
        self.epoch = Epoch(0)  # of the layout that this member has committed

    def __contains__(self, plan_id: str) -> bool:
        return plan_id in self._until_s

    @property
    def is_any(self) -> bool:
        """Whether there is one."""
        return any(until_s > time.monotonic() for until_s in self._until_s.values())

    def note(self, plan: SwitchPlan) -> None:
        """Remembers a plan for a while."""
        now_s = time.monotonic()
        self._until_s = {plan_id: until_s for plan_id, until_s in self._until_s.items() if until_s > now_s}
        self._until_s[plan.plan_id] = now_s + PREPARED_S

    def forget(self, plan_id: str) -> None:
        """A plan has failed, or is called off."""
        self._until_s.pop(plan_id, None)

    def committed(self, plan: SwitchPlan) -> None:
        """A plan is carried out: the layout has its epoch."""
        self.epoch = Epoch(plan.epoch + 1)
        self.forget(plan.plan_id)

    def check(self, plan: SwitchPlan) -> None:
        """Whether this member can take part now.

        Raises:
            StepError: why it cannot (FenceError: the plan is for another layout).
        """
        key = self._member.key
        if key not in plan.members:
            raise FenceError(f"instance {key} is not a member of {plan.group} any more")
        if plan.epoch < self.epoch:
            raise FenceError(f"the plan is for epoch {plan.epoch}, and instance {key} is at {self.epoch}")
        change_of(plan).check(self._member, self._wiring, plan)

    def change(self, plan: SwitchPlan) -> Change[Any, Any, Any]:
        """This member's part in the plan. Raises as `check`."""
        self.check(plan)
        return change_of(plan)(self._member, self._wiring, self._running_group, plan)
