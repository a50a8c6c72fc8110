"""Carries out switches: prepare at all members -> commit at the leader, or abort.

    TRANSITION_START --all prepared, same groups-> commit --report--> TRANSITION_END    layout: epoch + 1
          |                                          |
          | a member refuses, is silent, ends        | refused, silent, the leader ends
          v                                          v
        abort at all members ------------------> TRANSITION_ERROR    layout: as before, then as the members say

Switches that have no member in common run side by side, and one that fails leaves the others alone: each is fenced by
the groups that it was made for, and by the epoch that each of its members has committed. After a failure the members
of that switch alone rest, the longer the more tries have failed.

Nothing here is needed for a switch to end well: members that hear no more of a prepared plan forget it, and a commit
goes on at its leader. So this may be cancelled, or die, at any point; what the members then say is the layout.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from pengserve.controller import state as transitions
from pengserve.controller.ports import ReplicaPort
from pengserve.controller.slots import backoff_s
from pengserve.controller.state import ClusterState, Transition
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.errors import EngineError, PengServeError, StepError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.layout import Group
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import SwitchRecord

logger = logging.getLogger(__name__)

_LOOK_PERIOD_S = 0.1  # how often a wait for a leader looks whether it still lives

T = TypeVar("T")


class _Failed(NamedTuple):
    """A switch that was aborted."""

    plan: SwitchPlan  # the newest about its group
    num_tries: int  # that have failed in a row
    retry_at_s: float


class Keeper(Protocol):
    """Who keeps the cluster's state."""

    def state(self) -> ClusterState:
        """The state that counts now."""
        ...

    async def update(self, change: Callable[[ClusterState], Transition]) -> None:
        """Makes `change`'s result the state that counts, with nothing in between, and logs what happened."""
        ...


class Coordinator:
    """No two switches under way have a member in common. `begin` returns at once; `on_end` runs when one has ended."""

    def __init__(
        self,
        config: ControllerConfig,
        port: ReplicaPort,
        keeper: Keeper,
        *,
        on_end: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.record: SwitchRecord | None = None  # of the switch that has begun, gone on or ended most recently
        self._config, self._port, self._keeper, self._on_end = config, port, keeper, on_end
        self._clock, self._wall_clock = clock, wall_clock
        self._tasks: dict[asyncio.Task[None], SwitchPlan] = {}
        self._failed: dict[Group, _Failed] = {}

    @property
    def resting(self) -> tuple[SwitchPlan, ...]:
        """Switches that have failed, and whose members wait for the next try."""
        now_s = self._clock()
        return tuple(failed.plan for failed in self._failed.values() if now_s < failed.retry_at_s)

    @property
    def under_way(self) -> tuple[SwitchPlan, ...]:
        """The switches that have begun and not ended."""
        return tuple(self._tasks.values())

    def forgive(self) -> None:
        """Ends all waits after failures: a user has changed what the layout should be."""
        self._failed.clear()

    def begin(self, plan: SwitchPlan) -> None:
        """Begins `plan`, which the caller has checked. One that is stale by then is not begun; plan again."""
        assert all(plan.is_apart(other) for other in self._tasks.values()), "a member is in one switch at a time"
        task = asyncio.get_running_loop().create_task(self._carry_out(plan), name=f"switch {plan.plan_id}")
        self._tasks[task] = plan
        task.add_done_callback(self._ended)

    async def close(self, why: str = "") -> None:
        """Cancels what is under way; the ends are logged where `why` is given."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for plan in self._keeper.state().switches if why and tasks else ():
            await self._fail(plan, why)

    # One switch -------------------------------------------------------------------------------------------------------

    async def _carry_out(self, plan: SwitchPlan) -> None:
        try:
            await self._keeper.update(lambda state: transitions.begin_switch(state, plan))
        except PengServeError as error:
            logger.info("switch %s was not begun: %s", plan.plan_id, error)
            return
        started_s = self._clock()
        record = self.record = SwitchRecord(
            plan_id=plan.plan_id,
            what=transitions.what(plan),
            phase="prepare",
            why=plan.why,
            started_s=self._wall_clock(),
        )

        def note(phase: str, **more: Any) -> None:
            self.record = replace(record, phase=phase, seconds=self._clock() - started_s, **more)

        try:
            await self._prepare(plan)
            prepare_s = self._clock() - started_s
            transitions.require_groups(self._keeper.state(), plan)
            note("commit")
            report = await self._commit(plan)
        except Exception as error:
            if not isinstance(error, PengServeError):
                logger.exception("switch %s failed", plan.plan_id)
            await self._abort(plan)
            await self._fail(plan, _sentence(error))
            note("aborted", failure=_sentence(error))
            return
        seconds = {"prepare_s": prepare_s, "commit_s": self._clock() - started_s - prepare_s}
        await self._keeper.update(lambda s: transitions.end_switch(s, plan, report, seconds, self._clock()))
        self._failed = {group: failed for group, failed in self._failed.items() if failed.plan.is_apart(plan)}
        note("done", report=report)

    async def _prepare(self, plan: SwitchPlan) -> None:
        """Raises StepError where a member cannot take part; waits for all answers all the same."""
        timeout_s = self._config.prepare_timeout_s
        calls = (self._bounded(key, self._port.prepare(key, plan), timeout_s) for key in plan.members)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for key, answer in zip(plan.members, answers, strict=True):
            if isinstance(answer, BaseException):
                raise StepError(f"instance {key} cannot take part: {_sentence(answer)}") from answer

    async def _commit(self, plan: SwitchPlan) -> SwitchReport:
        timeout_s = self._config.commit_timeout_s + (plan.drain_timeout_s if plan.waits else 0.0)
        return await self._bounded(plan.leader, self._port.commit(plan.leader, plan), timeout_s)

    async def _abort(self, plan: SwitchPlan) -> None:
        """Tells all members; who does not hear it forgets the plan by its own time-out."""
        timeout_s = self._config.status_timeout_s
        calls = (self._bounded(key, self._port.abort(key, plan.plan_id), timeout_s) for key in plan.members)
        for key, answer in zip(plan.members, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, BaseException):
                logger.info("instance %s was not told to forget switch %s: %s", key, plan.plan_id, _sentence(answer))

    async def _bounded(self, key: InstanceKey, call: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """The call's result.

        Raises:
            EngineError: the instance's life has ended. TimeoutError: no answer. Else what the call raises.
        """
        task = asyncio.get_running_loop().create_task(call)
        deadline_s = self._clock() + timeout_s
        try:
            while not task.done():
                left_s = deadline_s - self._clock()
                if left_s <= 0:
                    raise TimeoutError(f"no answer within {timeout_s:g} s")
                slot = self._keeper.state().slots[key.instance_id]
                if slot.key != key or not slot.alive:
                    raise EngineError(f"instance {key} has ended")
                await asyncio.wait({task}, timeout=min(left_s, _LOOK_PERIOD_S))
            return task.result()
        finally:
            task.cancel()  # harmless where it has ended

    async def _fail(self, plan: SwitchPlan, why: str) -> None:
        before = self._failed.get(plan.group)
        num_tries = before.num_tries + 1 if before is not None else 1
        self._failed[plan.group] = _Failed(plan, num_tries, self._clock() + backoff_s(self._config, num_tries))
        await self._keeper.update(lambda state: transitions.fail_switch(state, plan, why, self._clock()))

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a switch ended in an error of its own", exc_info=error)
        self._on_end()


def _sentence(error: BaseException) -> str:
    """What went wrong, for people."""
    return str(error) or type(error).__name__
