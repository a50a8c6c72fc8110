"""One instance's part in switches: takes a controller's calls, talks to the other members, and leaves a broken group.

Calls come from any thread and are carried out in the step thread, between steps. A commit goes to the leader alone:

    leader   commit -> (drain) -> meet ~~~~~ short steps until all have met ~~~~~> move requests -> commit
    others             (drain) -> meet: stop at a step boundary ---------------> move requests -> commit

Every wait has a time-out, after which a member is back where it was, or in dp where requests had begun to move.
"""

import logging
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.directory import PeerDirectory
from pengserve.planners.types.errors import EngineError, StepError
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.replicas.comm.peers import PeerNetwork
from pengserve.replicas.comm.pool import CommunicatorPool
from pengserve.replicas.engine.groups.group_run import STEP
from pengserve.replicas.engine.instance_lanes import Lanes
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.following import Following
from pengserve.replicas.switching.leading import Leading
from pengserve.replicas.switching.member import SWITCH, Member, RequestOwner
from pengserve.replicas.switching.messages import Cancel, Drain, Drained, Meet, Met, Return, SwitchCodec
from pengserve.replicas.switching.prepared import Prepared
from pengserve.replicas.switching.running_group import BROKEN, RunningGroup, end_run
from pengserve.replicas.switching.step_thread import StepThread, Submit
from pengserve.replicas.switching.wiring import Wiring

logger = logging.getLogger(__name__)


class Agent:
    """Owns the member's state between switches. `on_changed` is called in the step thread after each."""

    def __init__(self, member: Member, submit: Submit, on_changed: Callable[[], None]) -> None:
        self._member, self._submit, self._on_changed = member, submit, on_changed
        self.before_switch: Callable[[], None] = lambda: None  # what a switch in preparation ends
        self.before_break: Callable[[], None] = lambda: None  # what ends with the lane of a group that breaks
        self._steps = StepThread(submit, member.timeout_s)
        self._wiring = Wiring(member, submit, self._require_group)
        self._running_group = RunningGroup(member, self._wiring, submit, self._broken)
        self._prepared = Prepared(member, self._wiring, self._running_group)
        parts = member, self._steps, self._prepared, self._running_group
        self._leading = Leading(*parts, on_changed)
        self._following = Following(*parts, self._leading.require_free, on_changed)
        self.endpoint = ""  # where peers connect
        member.lanes.on_broken = self._broken
        member.network.subscribe(
            STEP, lambda _, __, data: submit(lambda: self._running_group.follow(data)), self._on_lost
        )
        member.network.subscribe(SWITCH, self._on_switch)
        member.network.subscribe(BROKEN, self._on_broken)

    @classmethod
    def build(
        cls,
        *,
        key: InstanceKey,
        config: InstanceConfig,
        lanes: Lanes,
        bind_host: str,
        reachable_host: str,
        owner: RequestOwner,
        submit: Submit,
        on_changed: Callable[[], None],
    ) -> "Agent":
        """An agent with its own listener for peers and no group yet.

        Raises:
            EngineError: the address cannot be bound.
            UnsupportedShapeError: the engine's worker is in another process, so there can be no lanes.
        """
        device = lanes.dp.worker.device
        network = PeerNetwork(
            key,
            bind_host,
            config.channel_token,
            lambda *_: None,
            lambda _: None,
            config.peer_timeout_s,
            config.fingerprint,
        )
        try:
            pool = CommunicatorPool(network, device, config.peer_timeout_s, config.communicator or None)
            member = Member(key, lanes, network, pool, owner, config.peer_timeout_s)
            agent = cls(member, submit, on_changed)
        except BaseException:
            network.close()
            raise
        agent.endpoint = f"{reachable_host}:{network.endpoint.rpartition(':')[2]}"
        return agent

    @property
    def leader(self) -> InstanceKey | None:
        """Who leads the group that runs here; None in dp."""
        return self._running_group.leader

    @property
    def epoch(self) -> Epoch:
        """Of the layout that was committed here."""
        return self._prepared.epoch

    @property
    def member(self) -> Member:
        """This instance's side, as migrations share it."""
        return self._member

    @property
    def is_switching(self) -> bool:
        """Whether a plan is prepared or under way here."""
        return self._leading.switch is not None or self._prepared.is_any

    def groups_ready(self) -> tuple[str, ...]:
        """Names of the groups that can be formed."""
        return self._member.pool.ready()

    def groups_failed(self) -> tuple[str, ...]:
        """Names of the groups that must be built anew."""
        return self._member.pool.failed()

    # The controller's calls, from any thread --------------------------------------------------------------------------

    def connect(self, directory: PeerDirectory) -> None:
        """Takes a newer directory; returns at once. Lanes and communicators are built in the background."""
        self._wiring.connect(directory)

    def prepare(self, plan: SwitchPlan) -> None:
        """Checks whether this member can take part, and remembers the plan for a while. Changes nothing visible.

        Raises:
            StepError: it cannot, and why (FenceError: the plan is for another layout).
        """

        def prepare() -> None:
            self._leading.require_free()
            self._prepared.check(plan)
            self.before_switch()
            self._prepared.note(plan)
            reached("prepared")

        self._steps.ask(prepare)

    def commit(self, plan: SwitchPlan) -> SwitchReport:
        """Carries out a prepared plan that this member leads. Idempotent.

        Raises:
            StepError: nothing was changed, and why.
            EngineError: it failed half-way; all members are in dp, and no request is lost.
        """
        switch = self._steps.ask(lambda: self._leading.begin(plan))
        if isinstance(switch, SwitchReport):
            return switch
        timeout_s = 4 * self._member.timeout_s + (plan.drain_timeout_s if plan.waits else 0.0)
        try:
            return switch.outcome.result(timeout_s)
        except FutureTimeoutError:
            raise EngineError(f"the switch {plan.plan_id} took longer than {timeout_s:g} s") from None

    def abort(self, plan_id: str) -> None:
        """Forgets a prepared plan, and calls off one that is still draining or meeting."""

        def abort() -> None:
            self._prepared.forget(plan_id)
            if self._leading.is_about(plan_id):
                self._leading.fail(StepError("the controller called the switch off"))

        self._submit(abort)

    def close(self) -> None:
        """Ends all connections with peers."""
        self._member.pool.close()
        self._member.network.close()

    # What peers say ---------------------------------------------------------------------------------------------------

    def _on_switch(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        """In a reader thread. Words that begin a phase wait for a step boundary; others go to the `Conversation`."""
        message = SwitchCodec().decode(parts)
        plan_id, word, leading, following = message.plan_id, message.word, self._leading, self._following
        match word:
            case Drain():
                self._submit(lambda: following.drain(key, word.plan))
            case Drained():
                self._submit(lambda: leading.on_drained(plan_id, key))
            case Return():
                self._submit(lambda: following.bring_back(word.plan, word.withheld))
            case Meet():
                self._submit(lambda: following.join(word.plan))
            case _ if isinstance(word, Met):
                self._submit(lambda: leading.on_met(key, plan_id, word))
            case _:
                if isinstance(word, Cancel):
                    self._submit(lambda: self._on_cancel(key, plan_id, word.why))
                self._member.inbox.put((key, message))

    def _on_cancel(self, key: InstanceKey, plan_id: str, why: str) -> None:
        """Instance `key` has called a plan off: its leader, or a follower that cannot take part."""
        if self._leading.is_about(plan_id):
            self._leading.fail(StepError(f"instance {key} cannot take part: {why}"))
        else:
            self._following.call_off(key, plan_id)

    # Steps and faults -------------------------------------------------------------------------------------------------

    def boundary(self) -> None:
        """After each step, in the step thread."""
        self._leading.boundary()
        self._following.boundary()

    def _on_lost(self, key: InstanceKey) -> None:
        if key in self._running_group.members:
            self._running_group.pipeline.interrupt()
        self._member.inbox.put((key, None))
        self._wiring.lost(key)  # here, and not in the step thread: that may wait for the peer on a device
        self._submit(lambda: self._lost(key))

    def _lost(self, key: InstanceKey) -> None:
        switch = self._leading.switch
        if switch is not None and key in switch.plan.members:
            self._leading.fail(StepError(f"instance {key} was lost"))
        self._following.lost(key)
        if key in self._running_group.members:
            self._broken(EngineError(f"instance {key} was lost"))

    def _require_group(self) -> None:
        """Leaves a group whose communicators the controller has ended. An idle group runs no step that would notice."""
        if self._running_group.name and self._running_group.name not in self._member.pool.ready():
            self._broken(EngineError("the controller has ended the group"))

    def _on_broken(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        name, error = str(parts[0], "utf-8"), EngineError(f"instance {key} has left the group")
        if self._running_group.name == name:
            self._running_group.pipeline.interrupt()
            self._member.pool.mark_failed(name)  # here, as in `_on_lost`

        def leave() -> None:
            if self._running_group.name == name:
                self._broken(error)

        self._submit(leave)

    def _broken(self, error: BaseException) -> None:
        """The running group cannot go on: back to dp at once. Its requests are resumed from their tokens."""
        lanes = self._member.lanes
        if lanes.running is None:
            return
        logger.warning("instance %s leaves %s: %s", self._member.key, lanes.running.name, error)
        self.before_break()
        if self._running_group.run is not None:
            end_run(self._member, self._running_group.run)
        self._running_group.end()
        if self._leading.switch is not None:
            self._leading.fail(error)
        lost = lanes.abandon()
        self._member.owner.moved(lost, None, carried=False)
        self._on_changed()
