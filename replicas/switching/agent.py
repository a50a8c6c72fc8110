"""One instance's part in switches: takes a controller's calls, talks to the other members, and mends what breaks.

Calls come from any thread and are carried out in the step thread, between steps. A commit goes to the leader alone:

    leader   commit -> (drain) -> meet ~~ goes on stepping until all have met ~~> move requests -> commit
    others             (drain) -> meet: stop at a step boundary ---------------> move requests -> commit

Every wait has a time-out, after which a member is back where it was, or in dp where requests had begun to move.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.directory import GroupSpec, PeerDirectory
from pengserve.planners.types.errors import EngineError, FenceError, LinkLostError, PengServeError, StepError
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.plans import SwitchPlan, SwitchReport, SwitchStrategy
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.comm.peers import PeerNetwork
from pengserve.replicas.comm.pool import CommunicatorPool
from pengserve.replicas.engine.lanes import Lanes
from pengserve.replicas.switching.draining import Drain
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import SWITCH, Conversation, Member, RequestOwner
from pengserve.replicas.switching.merging import LeaderMerge, check_merge, join_merge, travellers
from pengserve.replicas.switching.messages import SwitchCodec, SwitchMessage, Word
from pengserve.replicas.switching.splitting import LeaderSplit, check_split, join_split

logger = logging.getLogger(__name__)

STEP = "step"  # kind of peer messages that hold a step of the leader's
PREPARED_S = 60.0  # a prepared plan that nobody commits is forgotten after so long
_REPORTS_KEPT = 32


class _Commit:
    """A commit under way at the leader."""

    def __init__(self, plan: SwitchPlan) -> None:
        self.plan = plan
        self.outcome: Future[SwitchReport] = Future()
        self.met: dict[InstanceKey, SwitchMessage] = {}
        self.drained: set[InstanceKey] = set()
        self.started_s = time.perf_counter()
        self.drain_s = 0.0
        self.is_meeting = False


class Agent:
    """Owns the member's state between switches. `on_changed` is called in the step thread after each."""

    def __init__(self, member: Member, submit: Callable[[Callable[[], object]], None], on_changed: Callable[[], None]):
        self._member, self._submit, self._on_changed = member, submit, on_changed
        self._codec = SwitchCodec()  # the step thread's
        self._directory: PeerDirectory | None = None
        self._connecting = threading.Lock()
        self._prepared: dict[str, tuple[SwitchPlan, float]] = {}
        self._reports: OrderedDict[str, SwitchReport] = OrderedDict()
        self._commit: _Commit | None = None
        self._drain: Drain | None = None
        self.endpoint = ""  # where peers connect
        self.epoch = Epoch(0)
        self.group_name = ""  # of the running group's communicators
        member.lanes.on_broken = self._broken
        member.network.subscribe(STEP, self._on_step, self._on_lost)
        member.network.subscribe(SWITCH, self._on_switch)

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
        submit: Callable[[Callable[[], object]], None],
        on_changed: Callable[[], None],
    ) -> "Agent":
        """An agent with its own listener for peers and no group yet.

        Raises:
            EngineError: the address cannot be bound.
        """
        network = PeerNetwork(
            key, bind_host, config.channel_token, lambda *_: None, lambda _: None, config.peer_timeout_s
        )
        pool = CommunicatorPool(network, lanes.dp.worker.device, config.peer_timeout_s)
        member = Member(key, lanes, network, pool, owner, config.peer_timeout_s)
        agent = cls(member, submit, on_changed)
        agent.endpoint = f"{reachable_host}:{network.endpoint.rpartition(':')[2]}"
        return agent

    @property
    def leader(self) -> InstanceKey | None:
        """Who leads the group that runs here; None in dp."""
        specs = self._directory.groups if self._directory else ()
        return next((spec.members[0] for spec in specs if spec.name == self.group_name), None)

    def groups_ready(self) -> tuple[str, ...]:
        """Names of the groups that can be formed."""
        return self._member.pool.ready()

    def groups_failed(self) -> tuple[str, ...]:
        """Names of the groups that must be built anew."""
        return self._member.pool.failed()

    # The controller's calls, from any thread --------------------------------------------------------------------------

    def connect(self, directory: PeerDirectory) -> None:
        """Takes a newer directory; returns at once. Lanes and communicators are built in the background."""
        if self._directory is None or directory.version > self._directory.version:
            self._directory = directory
            threading.Thread(target=self._connect, args=(directory,), name="connect", daemon=True).start()

    def prepare(self, plan: SwitchPlan) -> None:
        """Checks whether this member can take part, and remembers the plan for a while. Changes nothing visible.

        Raises:
            StepError: it cannot, and why (FenceError: the plan is for another layout).
        """
        self._in_step_thread(lambda: self._prepare(plan))

    def commit(self, plan: SwitchPlan) -> SwitchReport:
        """Carries out a prepared plan that this member leads. Idempotent.

        Raises:
            StepError: nothing was changed, and why.
            EngineError: it failed half-way; all members are in dp, and no request is lost.
        """
        commit = self._in_step_thread(lambda: self._begin(plan))
        if isinstance(commit, SwitchReport):
            return commit
        timeout_s = 4 * self._member.timeout_s + (plan.drain_timeout_s if _drains(plan) else 0.0)
        try:
            return commit.outcome.result(timeout_s)
        except FutureTimeoutError:
            raise EngineError(f"the switch {plan.plan_id} took longer than {timeout_s:g} s") from None

    def abort(self, plan_id: str) -> None:
        """Forgets a prepared plan, and calls off one that is still draining or meeting."""

        def abort() -> None:
            self._prepared.pop(plan_id, None)
            if self._commit is not None and self._commit.plan.plan_id == plan_id:
                self._fail(StepError("the controller called it off"))

        self._submit(abort)

    def close(self) -> None:
        """Ends all connections with peers."""
        self._member.pool.close()
        self._member.network.close()

    # Directory --------------------------------------------------------------------------------------------------------

    def _connect(self, directory: PeerDirectory) -> None:
        with self._connecting:
            if self._directory is not directory:
                return  # a newer one came meanwhile
            member = self._member
            try:
                member.network.connect(directory.peers, member.timeout_s)
            except LinkLostError as error:
                logger.warning("%s", error)  # groups with those peers fail, the others are built
            mine = [spec for spec in directory.groups if member.key in spec.members]
            built = threading.Event()
            for spec in mine:
                self._submit(lambda spec=spec: member.lanes.build(spec.group, spec.members.index(member.key)))
            self._submit(built.set)
            built.wait(60.0)
            member.pool.build(mine)

    def _spec(self, plan: SwitchPlan) -> GroupSpec:
        for spec in self._directory.groups if self._directory else ():
            if spec.members == plan.members and spec.group == plan.group:
                return spec
        raise StepError(f"instance {self._member.key} knows no group {plan.group} of these lives")

    # The leader's side ------------------------------------------------------------------------------------------------

    def _prepare(self, plan: SwitchPlan) -> None:
        self._check(plan)
        now_s = time.monotonic()
        self._prepared = {i: kept for i, kept in self._prepared.items() if kept[1] > now_s}
        self._prepared[plan.plan_id] = (plan, now_s + PREPARED_S)
        reached("prepared")

    def _check(self, plan: SwitchPlan) -> None:
        if self._member.key not in plan.members:
            raise FenceError(f"instance {self._member.key} is not a member of {plan.group} any more")
        if plan.epoch < self.epoch:
            raise FenceError(f"the plan is for epoch {plan.epoch}, and instance {self._member.key} is at {self.epoch}")
        if self._commit is not None:
            raise StepError(f"instance {self._member.key} is in the middle of {self._commit.plan.plan_id}")
        if plan.is_merge:
            self._member.pool.get(self._spec(plan).name)
            check_merge(self._member, plan)
        else:
            check_split(self._member, plan)

    def _begin(self, plan: SwitchPlan) -> "SwitchReport | _Commit":
        if plan.plan_id in self._reports:
            return self._reports[plan.plan_id]
        if self._commit is not None and self._commit.plan.plan_id == plan.plan_id:
            return self._commit
        if plan.plan_id not in self._prepared:
            raise StepError(f"instance {self._member.key} has not prepared {plan.plan_id}")
        self._check(plan)
        reached("begun")
        commit = self._commit = _Commit(plan)
        try:
            if _drains(plan):
                self._start_drain(commit)
            else:
                self._meet(commit)
        except PengServeError as error:
            self._fail(error)
        return commit

    def _start_drain(self, commit: _Commit) -> None:
        plan = commit.plan
        if plan.is_merge:
            Conversation(self._member, plan).tell_all(Word.DRAIN, plan=plan)
        self._drain = Drain(self._member.lanes.current, plan, lambda: self._drained(self._member.key))
        self._drain.check()
        reached("draining")
        self._after(plan.drain_timeout_s, lambda: self._meet_now(commit))

    def _drained(self, key: InstanceKey) -> None:
        commit = self._commit
        if commit is None:
            return
        commit.drained.add(key)
        if not commit.plan.is_merge or len(commit.drained) == len(commit.plan.members):
            # Not from within a step's callbacks: the next boundary is soon enough.
            self._submit(lambda: self._meet_now(commit))

    def _meet_now(self, commit: _Commit) -> None:
        if self._commit is commit and not commit.is_meeting:
            commit.drain_s = time.perf_counter() - commit.started_s
            try:
                self._meet(commit)
            except PengServeError as error:
                self._fail(error)

    def _meet(self, commit: _Commit) -> None:
        """Asks the others to stop at their next step boundary. This member goes on stepping until all have."""
        commit.is_meeting = True
        commit.started_s = time.perf_counter()
        if not commit.plan.is_merge:
            self._lead_split(commit)
            return
        Conversation(self._member, commit.plan).tell_all(Word.MEET, plan=commit.plan)
        reached("meeting")
        self._after(self._member.timeout_s, lambda: self._meet_timeout(commit))

    def _meet_timeout(self, commit: _Commit) -> None:
        if self._commit is commit:
            missing = [str(key) for key in commit.plan.members[1:] if key not in commit.met]
            self._fail(StepError(f"instances {', '.join(missing)} did not meet within {self._member.timeout_s:g} s"))

    def _on_met(self, key: InstanceKey, message: SwitchMessage) -> None:
        commit = self._commit
        if commit is None or commit.plan.plan_id != message.plan_id:
            return
        commit.met[key] = message
        if len(commit.met) == len(commit.plan.members) - 1:
            self._lead_merge(commit)

    def _lead_merge(self, commit: _Commit) -> None:
        plan, member = commit.plan, self._member
        self._empty_inbox()
        meet_s = time.perf_counter() - commit.started_s
        talk = Conversation(member, plan)
        kept = self._end_drain()
        name = self._spec(plan).name
        merge = LeaderMerge(talk, name, Epoch(plan.epoch + 1))
        try:
            report = merge.run(commit.met, travellers(member, plan, kept))
        except Exception as error:
            if not isinstance(error, PengServeError):
                logger.exception("the merge %s failed", plan.plan_id)
            talk.cancel(str(error))
            merge.undo()
            member.pool.mark_failed(name)
            self._fail(EngineError(f"the merge failed half-way ({error}); all members are in dp"))
            return
        self._lead(name)
        self._succeed(commit, report, meet_s)

    def _lead(self, name: str) -> None:
        lane = self._member.lanes.running
        assert lane is not None
        self.group_name = name
        stamp = name.encode()
        followers, network = lane.followers, self._member.network

        def send(parts: Sequence[Buffer]) -> None:
            for key in followers:
                network.send(key, STEP, [stamp, *parts])

        lane.on_step = send

    def _lead_split(self, commit: _Commit) -> None:
        plan, member = commit.plan, self._member
        lane = member.lanes.running
        assert lane is not None
        self._end_drain()
        talk = Conversation(member, plan)
        has_begun = False
        try:
            check_split(member, plan)
            self._empty_inbox()
            has_begun = True
            talk.tell_all(Word.MEET, plan=plan)
            reached("meeting")
            met = talk.gather(Word.MET)
            meet_s = time.perf_counter() - commit.started_s
            report = LeaderSplit(talk, lane, self.group_name, Epoch(plan.epoch + 1)).run(met)
        except Exception as error:
            if not isinstance(error, PengServeError):
                logger.exception("the split %s failed", plan.plan_id)
            talk.cancel(str(error))
            if has_begun:
                self._broken(error)
            self._fail(error if isinstance(error, PengServeError) else EngineError(f"the split failed: {error}"))
            return
        self.group_name = ""
        self._succeed(commit, report, meet_s)

    def _succeed(self, commit: _Commit, report: SwitchReport, meet_s: float) -> None:
        report = replace(report, drain_s=commit.drain_s, meet_s=meet_s)
        self._reports[report.plan_id] = report
        while len(self._reports) > _REPORTS_KEPT:
            self._reports.popitem(last=False)
        self._commit = None
        self._changed_to(report.epoch, report.plan_id)
        commit.outcome.set_result(report)

    def _fail(self, error: BaseException) -> None:
        commit, self._commit = self._commit, None
        self._end_drain()
        if commit is not None:
            Conversation(self._member, commit.plan).cancel(str(error))
            self._prepared.pop(commit.plan.plan_id, None)
            commit.outcome.set_exception(error)
        self._on_changed()

    def _changed_to(self, epoch: Epoch, plan_id: str) -> None:
        self.epoch = epoch
        self._prepared.pop(plan_id, None)
        self._on_changed()

    def _end_drain(self) -> frozenset[str] | None:
        drain, self._drain = self._drain, None
        return drain.end() if drain is not None else None

    # The followers' side ----------------------------------------------------------------------------------------------

    def _on_switch(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        """In a reader thread. What begins something is done between two steps; the rest goes to who waits for it."""
        message = SwitchCodec().decode(parts)
        if message.word is Word.MEET and message.plan is not None:
            plan = message.plan
            self._submit(lambda: self._join(key, plan))
        elif message.word is Word.DRAIN and message.plan is not None:
            plan = message.plan
            self._submit(lambda: self._join_drain(key, plan))
        elif message.word is Word.DRAINED:
            self._submit(lambda: self._drained(key))
        elif message.word is Word.MET and self._member.lanes.running is None:
            self._submit(lambda: self._on_met(key, message))
        else:
            if message.word is Word.CANCEL:
                self._submit(lambda: self._on_cancel(key, message))
            self._member.inbox.put((key, message))

    def _on_cancel(self, key: InstanceKey, message: SwitchMessage) -> None:
        """A cancel that nobody waited for: a drain is called off, or a follower cannot meet."""
        if self._drain is not None and self._drain.plan.plan_id == message.plan_id and self._commit is None:
            self._end_drain()
        commit = self._commit
        if commit is not None and commit.plan.plan_id == message.plan_id:
            self._fail(StepError(f"instance {key} cannot: {message.why}"))

    def _join_drain(self, leader: InstanceKey, plan: SwitchPlan) -> None:
        talk = Conversation(self._member, plan)
        if plan.plan_id not in self._prepared:
            talk.cancel("it has not prepared this")
            return
        self._drain = Drain(self._member.lanes.current, plan, lambda: talk.say(leader, Word.DRAINED))
        self._drain.check()
        reached("draining")
        drain = self._drain
        # The leader may die while this member pauses new requests for it.
        self._after(
            plan.drain_timeout_s + 2 * self._member.timeout_s, lambda: self._drain is drain and self._end_drain()
        )

    def _join(self, leader: InstanceKey, plan: SwitchPlan) -> None:
        """Between two steps: from here to the commit this member does nothing else."""
        reached("meeting")
        talk = Conversation(self._member, plan)
        kept = self._end_drain()
        self._empty_inbox()
        lane = self._member.lanes.running
        try:
            if plan.plan_id not in self._prepared:
                raise StepError("it has not prepared this")
            self._check(plan)
            if plan.is_merge:
                name = self._spec(plan).name
                join_merge(talk, name, travellers(self._member, plan, kept))
                self.group_name = name
            else:
                assert lane is not None
                join_split(talk, lane, self.group_name)
                self.group_name = ""
        except Exception as error:
            if not isinstance(error, PengServeError):
                logger.exception("the switch %s failed here", plan.plan_id)
            talk.cancel(str(error))
            if not plan.is_merge and self._member.lanes.running is not None:
                self._broken(error)
            self._on_changed()
            return
        self._changed_to(Epoch(plan.epoch + 1), plan.plan_id)

    def _empty_inbox(self) -> None:
        while not self._member.inbox.empty():
            self._member.inbox.get_nowait()

    # Steps and faults -------------------------------------------------------------------------------------------------

    def boundary(self) -> None:
        """After each step, in the step thread."""
        if self._drain is not None:
            self._drain.check()

    def _on_step(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        self._submit(lambda: self._follow(parts))

    def _follow(self, parts: list[memoryview]) -> None:
        if self._member.lanes.is_following and bytes(parts[0]) == self.group_name.encode():
            self._member.lanes.follow(parts[1:])

    def _on_lost(self, key: InstanceKey) -> None:
        self._member.inbox.put((key, None))
        self._submit(lambda: self._lost(key))

    def _lost(self, key: InstanceKey) -> None:
        commit = self._commit
        if commit is not None and key in commit.plan.members:
            self._fail(StepError(f"instance {key} was lost"))
        if self._drain is not None and key in self._drain.plan.members:
            self._end_drain()
        if self._directory is None or self._member.lanes.running is None:
            return
        running = next((spec for spec in self._directory.groups if spec.name == self.group_name), None)
        if running is None or key in running.members:
            self._broken(EngineError(f"instance {key} was lost"))

    def _broken(self, error: BaseException) -> None:
        """The running group cannot go on: back to dp at once. Its requests are resumed from their tokens."""
        lanes = self._member.lanes
        if lanes.running is None:
            return
        logger.warning("instance %s leaves %s: %s", self._member.key, lanes.running.group.unique_name, error)
        name, self.group_name = self.group_name, ""
        self._member.pool.mark_failed(name)  # also frees members that wait in a collective
        lost = lanes.abandon()
        self._member.owner.moved(lost, None, carried=False)
        self._on_changed()

    # Threads ----------------------------------------------------------------------------------------------------------

    def _in_step_thread(self, work: Callable[[], object]):  # type: ignore[no-untyped-def]
        done: Future[object] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._submit(run)
        try:
            return done.result(self._member.timeout_s)
        except FutureTimeoutError:
            raise StepError(f"instance {self._member.key} did not come to a step boundary in time") from None

    def _after(self, delay_s: float, work: Callable[[], object]) -> None:
        timer = threading.Timer(delay_s, lambda: self._submit(work))
        timer.daemon = True
        timer.start()


def _drains(plan: SwitchPlan) -> bool:
    waits = (SwitchStrategy.SEQUENTIAL, SwitchStrategy.SOFT) if plan.is_merge else (SwitchStrategy.SEQUENTIAL,)
    return plan.strategy in waits
