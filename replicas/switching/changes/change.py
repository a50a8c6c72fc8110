"""What every change of a layout consists of.

    check    whether this member can take part; nothing changes
    begin    the members stand at a step boundary: what this one brings; nothing changes
    move     leader: requests, KV and memory move, in rounds; `take` is one member's part in one of them
    commit   the new shape holds from the next step on
    undo     a member has failed after the first round has begun: this one comes back to `dp`

`leading.py` and `following.py` carry out every change in the same way, and know none of them.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from pengserve.planners.types.errors import PengServeError
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.layout import Group
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.replicas.engine.groups.group_run import GroupRun
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.messages import Answer, Met, Round
from pengserve.replicas.switching.running_group import RunningGroup, end_run
from pengserve.replicas.switching.wiring import Wiring

M = TypeVar("M", bound=Met)
R = TypeVar("R", bound=Round)
A = TypeVar("A", bound=Answer)

Ask = Callable[[R], Mapping[InstanceKey, A]]
"""One round: tells it to every member, this one too, and returns what each answers. Raises as `Conversation.hear`."""


class Change(ABC, Generic[M, R, A]):
    """One member's part in one change. Belongs to the step thread."""

    returns_weights: ClassVar[bool] = False  # weights come back beside the steps before the members meet
    rounds: ClassVar[tuple[type[Any], ...]]  # the words that `take` takes

    def __init__(self, member: Member, wiring: Wiring, running_group: RunningGroup, plan: SwitchPlan) -> None:
        """Changes nothing.

        Raises:
            StepError, EngineError: a lane is missing, or communicators are not ready.
        """
        self._member, self._wiring, self._running_group, self._plan = member, wiring, running_group, plan
        self.run: GroupRun | None = None  # of the group that this member is in after the commit

    @staticmethod
    @abstractmethod
    def check(member: Member, wiring: Wiring, plan: SwitchPlan) -> None:
        """Whether a member can take part now.

        Raises:
            StepError, EngineError: why it cannot.
        """

    @abstractmethod
    def begin(self, kept: frozenset[str] | None) -> M:
        """What this member brings to the meeting. Changes nothing.

        Args:
            kept: where running requests were to end first, the ids of those that ran then.
        """

    @abstractmethod
    def move(self, met: Mapping[InstanceKey, M], ask: Ask[R, A]) -> None:
        """Leader: moves what the members have brought; `met` holds this one's too.

        Raises:
            StepError, EngineError: a member failed.
        """

    @abstractmethod
    def take(self, message: R) -> A:
        """This member's part in a round.

        Raises:
            EngineError: a member failed.
        """

    @abstractmethod
    def commit(self) -> SwitchReport:
        """Enters the new shape; what moved, as far as this member knows."""

    @abstractmethod
    def undo(self) -> None:
        """Undoes what has changed since the first round. What ran here or came here is resumed from its tokens.

        A group that this change ends is left to the caller.
        """

    def fail(self, error: PengServeError, *, has_begun: bool) -> None:
        """A member has failed since they met: this one leaves every group that the change begins or ends.

        Args:
            has_begun: whether the first round has.
        """
        if has_begun:
            self.undo()
        if self.run is not None:
            end_run(self._member, self.run)  # others may have entered it
        lane = self._member.lanes.running
        if lane is not None and lane.name == str(self._plan.group):
            self._running_group.break_off(error)
        self._running_group.end_if_gone()

    @property
    def _leads(self) -> bool:
        return self._member.key == self._plan.leader

    def _new_run(self, group: Group, members: tuple[InstanceKey, ...]) -> GroupRun:
        communicator = self._member.pool.get(self._wiring.spec_of(group, members).name)
        seed = zlib.crc32(self._plan.plan_id.encode())
        return GroupRun(communicator=communicator, seed=seed, post=self._member.network)

    def _report(self, **counts: int) -> SwitchReport:
        return SwitchReport(plan_id=self._plan.plan_id, epoch=Epoch(self._plan.epoch + 1), **counts)
