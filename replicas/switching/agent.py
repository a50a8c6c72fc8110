"""One instance's part in switches: takes a controller's calls, talks to the other members, and mends what breaks.

Calls come from any thread and are carried out in the step thread, between steps. A commit goes to the leader alone:

    leader   commit -> (drain) -> meet ~~ goes on stepping until all have met ~~> move requests -> commit
    others             (drain) -> meet: stop at a step boundary ---------------> move requests -> commit

Every wait has a time-out, after which a member is back where it was, or in dp where requests had begun to move.
"""

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial
from typing import cast

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.directory import PeerDirectory
from pengserve.planners.types.errors import EngineError, FenceError, LinkLostError, PengServeError, StepError
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.layout import GroupKind
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.comm.peers import PeerNetwork
from pengserve.replicas.comm.pool import CommunicatorPool
from pengserve.replicas.engine.exchange import DropExchange
from pengserve.replicas.engine.lanes import Lanes
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.tp_lane import TpLane
from pengserve.replicas.switching.commit import Commit, drains, is_restore
from pengserve.replicas.switching.draining import Drain
from pengserve.replicas.switching.dropping import LeaderDrop, join_drop
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import SWITCH, Conversation, Member, RequestOwner
from pengserve.replicas.switching.merging import LeaderMerge, check_merge, join_merge, travellers
from pengserve.replicas.switching.messages import SwitchCodec, SwitchMessage, Word
from pengserve.replicas.switching.pipeline import PipelineTraffic
from pengserve.replicas.switching.restoring import LeaderRestore, join_restore
from pengserve.replicas.switching.splitting import LeaderSplit, check_split, join_split
from pengserve.replicas.switching.step_thread import StepThread, Submit
from pengserve.replicas.switching.wiring import Wiring

logger = logging.getLogger(__name__)

STEP = "step"  # kind of peer messages that hold a step of the leader's
BROKEN = "broken"  # ... that name a group which its members must leave at once
PREPARED_S = 60.0  # a prepared plan that nobody commits is forgotten after so long
_REPORTS_KEPT = 32


class Agent:
    """Owns the member's state between switches. `on_changed` is called in the step thread after each."""

    def __init__(self, member: Member, submit: Submit, on_changed: Callable[[], None]) -> None:
        self._member, self._submit, self._on_changed = member, submit, on_changed
        self._steps = StepThread(submit, member.timeout_s)
        self._codec = SwitchCodec()  # the step thread's
        self._wiring = Wiring(member, submit, self._require_group)
        self._prepared: dict[str, tuple[SwitchPlan, float]] = {}
        self._reports: OrderedDict[str, SwitchReport] = OrderedDict()
        self._commit: Commit | None = None
        self._drain: Drain | None = None
        self.endpoint = ""  # where peers connect
        self.epoch = Epoch(0)
        self.group_name = ""  # of the running group's communicators
        self._mates: tuple[InstanceKey, ...] = ()  # its members, in rank order
        self._pipeline = PipelineTraffic(member, self._wiring, submit, self._broken)
        member.lanes.on_broken = self._broken
        member.network.subscribe(STEP, self._on_step, self._on_lost)
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
        return self._mates[0] if self._mates else None

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
        self._steps.ask(lambda: self._prepare(plan))

    def commit(self, plan: SwitchPlan) -> SwitchReport:
        """Carries out a prepared plan that this member leads. Idempotent.

        Raises:
            StepError: nothing was changed, and why.
            EngineError: it failed half-way; all members are in dp, and no request is lost.
        """
        commit = self._steps.ask(lambda: self._begin(plan))
        if isinstance(commit, SwitchReport):
            return commit
        timeout_s = 4 * self._member.timeout_s + (plan.drain_timeout_s if drains(plan) or is_restore(plan) else 0.0)
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
            self._member.pool.get(self._wiring.spec(plan).name)
            check_merge(self._member, plan)
        else:
            check_split(self._member, plan)

    def _begin(self, plan: SwitchPlan) -> "SwitchReport | Commit":
        if plan.plan_id in self._reports:
            return self._reports[plan.plan_id]
        if self._commit is not None and self._commit.plan.plan_id == plan.plan_id:
            return self._commit
        if plan.plan_id not in self._prepared:
            raise StepError(f"instance {self._member.key} has not prepared {plan.plan_id}")
        self._check(plan)
        reached("begun")
        commit = self._commit = Commit(plan)
        try:
            if is_restore(plan):
                self._start_return(commit)
            elif drains(plan):
                self._start_drain(commit)
            else:
                self._meet(commit)
        except PengServeError as error:
            self._fail(error)
        return commit

    def _start_return(self, commit: Commit) -> None:
        """Restore: weights come back beside the steps; the members meet when they are there."""
        plan, lane = commit.plan, self._member.lanes.running
        assert isinstance(lane, PpLane)
        withheld = lane.give_up_blocks()
        try:
            Conversation(self._member, plan).tell_all(Word.RETURN, plan=plan, lease=withheld)
            reached("returning")
            meet = partial(self._submit, lambda: self._meet_now(commit))
            self._pipeline.begin_return(lane, plan.plan_id, withheld, meet)
        except PengServeError:
            lane.offer_all()
            raise
        self._steps.after(plan.drain_timeout_s, lambda: self._return_timeout(commit))

    def _return_timeout(self, commit: Commit) -> None:
        if self._commit is commit and not commit.is_meeting:
            self._fail(StepError(f"the weights were not back within {commit.plan.drain_timeout_s:g} s"))

    def _join_return(self, plan: SwitchPlan, withheld: list[int]) -> None:
        talk, lane = Conversation(self._member, plan), self._member.lanes.running
        try:
            if plan.plan_id not in self._prepared or not isinstance(lane, PpLane):
                raise StepError("it has not prepared this")
            reached("returning")
            self._pipeline.begin_return(lane, plan.plan_id, withheld)
        except PengServeError as error:
            talk.cancel(str(error))

    def _start_drain(self, commit: Commit) -> None:
        plan = commit.plan
        if plan.is_merge:
            Conversation(self._member, plan).tell_all(Word.DRAIN, plan=plan)
        self._drain = Drain(self._member.lanes.current, plan, lambda: self._drained(plan.plan_id, self._member.key))
        self._drain.check()
        reached("draining")
        self._steps.after(plan.drain_timeout_s, lambda: self._meet_now(commit))

    def _drained(self, plan_id: str, key: InstanceKey) -> None:
        commit = self._commit
        if commit is None or commit.plan.plan_id != plan_id:
            return
        commit.drained.add(key)
        if not commit.plan.is_merge or len(commit.drained) == len(commit.plan.members):
            # Not from within a step's callbacks: the next boundary is soon enough.
            self._submit(lambda: self._meet_now(commit))

    def _meet_now(self, commit: Commit) -> None:
        if self._commit is commit and not commit.is_meeting:
            commit.drain_s = time.perf_counter() - commit.started_s
            try:
                self._meet(commit)
            except PengServeError as error:
                self._fail(error)

    def _meet(self, commit: Commit) -> None:
        """Asks the others to stop at their next step boundary. This member goes on stepping until all have."""
        commit.is_meeting = True
        commit.started_s = time.perf_counter()
        if not commit.plan.is_merge:
            self._split_when_empty(commit)
            return
        Conversation(self._member, commit.plan).tell_all(Word.MEET, plan=commit.plan)
        reached("meeting")
        self._steps.after(self._member.timeout_s, lambda: self._meet_timeout(commit))

    def _split_when_empty(self, commit: Commit) -> None:
        """A pipeline first finishes what is in it: see `boundary`."""
        lane = self._member.lanes.running
        if isinstance(lane, PpLane):
            lane.hold(True)
            if lane.num_in_flight:
                return
        self._lead_split(commit)

    def _meet_timeout(self, commit: Commit) -> None:
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

    def _lead_merge(self, commit: Commit) -> None:
        plan, member = commit.plan, self._member
        self._empty_inbox(plan)
        meet_s = time.perf_counter() - commit.started_s
        talk = Conversation(member, plan)
        kept = self._end_drain()
        try:
            name = self._wiring.spec(plan).name
            kind = LeaderDrop if plan.group.kind is GroupKind.PP else LeaderMerge
            merge = kind(talk, name, Epoch(plan.epoch + 1))
        except PengServeError as error:  # the group broke while its members met
            self._fail(error)
            return
        try:
            report = merge.run(commit.met, travellers(member, plan, kept))
        except Exception as error:
            if not isinstance(error, PengServeError):
                logger.exception("the merge %s failed", plan.plan_id)
            talk.cancel(str(error))
            merge.undo()
            self._end_group(name, plan.members)
            self._fail(EngineError(f"the merge failed half-way ({error}); all members are in dp"))
            return
        self._stand_in(name, plan.members, merge.exchange if isinstance(merge, LeaderDrop) else None)
        self._lead()
        self._succeed(commit, report, meet_s)

    def _stand_in(self, name: str, members: tuple[InstanceKey, ...], exchange: DropExchange | None = None) -> None:
        """This member runs in a group now; of a drop, `exchange` goes on."""
        self.group_name, self._mates = name, members
        lane = self._member.lanes.running
        if exchange is not None and isinstance(lane, PpLane):
            self._pipeline.begin(lane, name, members, exchange)

    def _stand_alone(self) -> None:
        self.group_name, self._mates = "", ()
        self._pipeline.end()

    def _lead(self) -> None:
        lane = self._member.lanes.running
        assert lane is not None
        stamp = self.group_name.encode()
        followers, network = lane.followers, self._member.network

        def send(parts: Sequence[Buffer]) -> None:
            for key in followers:
                network.send(key, STEP, [stamp, *parts])

        lane.on_step = send

    def _lead_split(self, commit: Commit) -> None:
        plan, member = commit.plan, self._member
        lane = member.lanes.running
        assert lane is not None
        self._end_drain()
        talk = Conversation(member, plan)
        has_begun = False
        try:
            check_split(member, plan)
            self._empty_inbox(plan)
            has_begun = True
            talk.tell_all(Word.MEET, plan=plan)
            reached("meeting")
            met = talk.gather(Word.MET)
            meet_s = time.perf_counter() - commit.started_s
            epoch = Epoch(plan.epoch + 1)
            if isinstance(lane, PpLane):
                report = LeaderRestore(talk, lane, self.group_name, epoch).run(met)
            else:
                report = LeaderSplit(talk, cast(TpLane, lane), self.group_name, epoch).run(met)
        except Exception as error:
            if not isinstance(error, PengServeError):
                logger.exception("the split %s failed", plan.plan_id)
            talk.cancel(str(error))
            failure = error if isinstance(error, PengServeError) else EngineError(f"the split failed: {error}")
            if has_begun:
                self._broken(failure)
            self._fail(failure)
            return
        self._stand_alone()
        self._succeed(commit, report, meet_s)

    def _succeed(self, commit: Commit, report: SwitchReport, meet_s: float) -> None:
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
        lane = self._member.lanes.running
        if isinstance(lane, PpLane):
            lane.hold(False)
            self._pipeline.undo_return(lane)
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
        elif message.word is Word.RETURN and message.plan is not None:
            plan = message.plan
            self._submit(lambda: self._join_return(plan, message.lease))
        elif message.word is Word.DRAINED:
            self._submit(lambda: self._drained(message.plan_id, key))
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
        lane = self._member.lanes.running
        if isinstance(lane, PpLane) and lane.rank != 0 and key == self._mates[0]:
            self._pipeline.undo_return(lane)
        commit = self._commit
        if commit is not None and commit.plan.plan_id == message.plan_id:
            self._fail(StepError(f"instance {key} cannot: {message.why}"))

    def _join_drain(self, leader: InstanceKey, plan: SwitchPlan) -> None:
        talk = Conversation(self._member, plan)
        if plan.plan_id not in self._prepared:
            talk.cancel("it has not prepared this")
            return

        def drained() -> None:
            with contextlib.suppress(LinkLostError):  # `_lost` calls the drain off
                talk.say(leader, Word.DRAINED)

        self._drain = Drain(self._member.lanes.current, plan, drained)
        self._drain.check()
        reached("draining")
        drain = self._drain
        # The leader may die while this member pauses new requests for it.
        self._steps.after(
            plan.drain_timeout_s + 2 * self._member.timeout_s, lambda: self._drain is drain and self._end_drain()
        )

    def _join(self, leader: InstanceKey, plan: SwitchPlan) -> None:
        """Between two steps: from here to the commit this member does nothing else."""
        reached("meeting")
        talk = Conversation(self._member, plan)
        kept = self._end_drain()
        self._empty_inbox(plan)
        lane, name = self._member.lanes.running, ""
        try:
            if plan.plan_id not in self._prepared:
                raise StepError("it has not prepared this")
            self._check(plan)
            if plan.is_merge:
                name = self._wiring.spec(plan).name
                own = travellers(self._member, plan, kept)
                if plan.group.kind is GroupKind.PP:
                    self._stand_in(name, plan.members, join_drop(talk, name, own))
                else:
                    join_merge(talk, name, own)
                    self._stand_in(name, plan.members)
            else:
                if isinstance(lane, PpLane):
                    join_restore(talk, lane, self.group_name)
                else:
                    join_split(talk, cast(TpLane, lane), self.group_name)
                self._stand_alone()
        except Exception as error:
            if not isinstance(error, PengServeError):
                logger.exception("the switch %s failed here", plan.plan_id)
            talk.cancel(str(error))
            if plan.is_merge:
                self._tell_broken(name, plan.members)  # the others may have gone on without this one
            elif lane is not None and lane.name == str(plan.group):
                self._broken(error)
            self._on_changed()
            return
        self._changed_to(Epoch(plan.epoch + 1), plan.plan_id)

    def _empty_inbox(self, plan: SwitchPlan) -> None:
        """Forgets words of other switches. One of this switch may have come already: that it is called off."""
        inbox, connected = self._member.inbox, self._member.network.peers()
        for _ in range(inbox.qsize()):
            key, message = inbox.get_nowait()
            if key not in connected if message is None else message.plan_id == plan.plan_id:
                inbox.put((key, message))

    # Steps and faults -------------------------------------------------------------------------------------------------

    def boundary(self) -> None:
        """After each step, in the step thread."""
        commit = self._commit
        if commit is not None and commit.is_meeting and not commit.plan.is_merge:
            self._split_when_empty(commit)
        if self._drain is not None:
            self._drain.check()

    def _on_step(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        self._submit(lambda: self._follow(parts))

    def _follow(self, parts: list[memoryview]) -> None:
        if self._member.lanes.is_following and bytes(parts[0]) == self.group_name.encode():
            self._member.lanes.follow(parts[1:])

    def _on_lost(self, key: InstanceKey) -> None:
        if key in self._mates:
            self._pipeline.interrupt()
        self._member.inbox.put((key, None))
        self._submit(lambda: self._lost(key))

    def _lost(self, key: InstanceKey) -> None:
        commit = self._commit
        if commit is not None and key in commit.plan.members:
            self._fail(StepError(f"instance {key} was lost"))
        if self._drain is not None and key in self._drain.plan.members:
            self._end_drain()
        if key in self._mates:
            self._broken(EngineError(f"instance {key} was lost"))
        self._wiring.lost(key)

    def _require_group(self) -> None:
        """A group that no directory lists any more has no communicators, and no step need come to notice."""
        if self.group_name and self.group_name not in self._member.pool.ready():
            self._broken(EngineError("the controller has ended the group"))

    def _on_broken(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        name, error = str(parts[0], "utf-8"), EngineError(f"instance {key} has left the group")
        if self.group_name == name:
            self._pipeline.interrupt()

        def leave() -> None:
            if self.group_name == name:
                self._broken(error)

        self._submit(leave)

    def _tell_broken(self, name: str, members: Sequence[InstanceKey]) -> None:
        for key in members:
            if key != self._member.key:
                with contextlib.suppress(LinkLostError):  # it sees the end of the connection
                    self._member.network.send(key, BROKEN, [name.encode()])

    def _end_group(self, name: str, members: Sequence[InstanceKey]) -> None:
        """No member may stay in a group that one has left: it would wait for ever for the next step."""
        self._member.pool.mark_failed(name)  # also frees members that wait in a collective
        self._tell_broken(name, members)

    def _broken(self, error: BaseException) -> None:
        """The running group cannot go on: back to dp at once. Its requests are resumed from their tokens."""
        lanes = self._member.lanes
        if lanes.running is None:
            return
        logger.warning("instance %s leaves %s: %s", self._member.key, lanes.running.name, error)
        self._end_group(self.group_name, self._mates)
        self._stand_alone()
        if self._commit is not None:
            self._fail(error)
        lost = lanes.abandon()
        self._member.owner.moved(lost, None, carried=False)
        self._on_changed()
