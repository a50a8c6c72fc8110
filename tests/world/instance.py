"""One life of an instance: a process that computes requests by a script, and obeys controllers as a real one does."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain

import msgspec

from pengserve.planners.types.directory import PeerDirectory
from pengserve.planners.types.errors import EngineError, FenceError, LinkLostError, StepError
from pengserve.planners.types.ids import NO_VERSION, Epoch, InstanceKey
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import InstanceSnapshot, InstanceState, InstanceStats
from pengserve.replicas.channel.frames import Frame, FrameKind
from pengserve.replicas.channel.server import HEARTBEAT_S
from pengserve.replicas.engine.vllm_seam import EngineCoreOutput, EngineCoreOutputs, FinishReason
from pengserve.replicas.engine.wire import Codec, Moved, Trial
from pengserve.replicas.revisions import Revisions
from pengserve.replicas.terms import TermFence
from pengserve.replicas.trial_gate import TrialGate
from tests.controller.fakes import CAPACITY, answer
from tests.world.answers import Answers, number_of
from tests.world.channel import InstanceEnd
from tests.world.chaos import Chaos

LOAD_S = 1.0
STEP_S = 0.08
FATAL_TOKEN = 2  # of a poisonous answer: computing it ends the process
DRAIN_LOOK_S = 0.1
DEGREES = (2,)

CODEC = Codec()


@dataclass
class Copy:
    """A request that runs here."""

    number: int
    num_tokens: int
    client: InstanceEnd
    request_id: str  # the wire id


class ScriptedInstance:
    """What a controller's port and an ingress's link reach. Dies when told to, or of a poisonous request."""

    def __init__(self, key: InstanceKey, node: str, chaos: Chaos, answers: Answers, *, is_elastic: bool) -> None:
        self.key, self.node = key, node
        self.copies: dict[str, Copy] = {}  # by wire id
        self.gate: TrialGate[Copy] = TrialGate(
            let_in=self._let_in,
            tell=self._tell_trial,
            num_requests=lambda: len(self.copies),
            is_reading=lambda: self._num_waiting > 0,
            clock=asyncio.get_running_loop().time,
        )
        self._owners: dict[str, InstanceEnd] = {}  # of all requests that came, by wire id
        self.clients: list[InstanceEnd] = []
        self.fence = TermFence()
        self.state, self.failure = InstanceState.STARTING, ""
        self.lane, self.epoch = "dp", Epoch(0)
        self.mates: tuple[ScriptedInstance, ...] = ()  # of the group that runs here
        self.is_alive = True
        self._chaos, self._answers, self._is_elastic = chaos, answers, is_elastic
        self._face = answer(key, InstanceState.READY, degrees=DEGREES if is_elastic else ())
        self._revisions = Revisions()
        self._directory = PeerDirectory(version=NO_VERSION, peers=(), groups=())
        self._prepared: set[str] = set()
        self._stopped_until_s = 0.0
        self._step = 0
        self._has_work = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._tasks = {loop.create_task(self._run()), loop.create_task(self._beat())}

    # The process ------------------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """Where it listens; its successors get the same port now and then."""
        return f"{self.node}:{7000 + self.key.incarnation % 2}"

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT so many seconds later."""
        self._stopped_until_s = max(self._stopped_until_s, self._chaos.now_s + seconds)

    def resume(self) -> None:
        """SIGCONT."""
        self._stopped_until_s = 0.0

    async def may_run(self) -> None:
        """Waits while the process is stopped."""
        while self._stopped_until_s > self._chaos.now_s:  # noqa: ASYNC110
            await asyncio.sleep(min(1.0, self._stopped_until_s - self._chaos.now_s))

    def fail(self) -> None:
        """The engine fails: the channel closes, the process goes on to say why."""
        if self.state is not InstanceState.DEAD:
            self._answers.num_other_deaths += bool(self.clients)
            self.state, self.failure = InstanceState.DEAD, "its engine failed"
            self._close()

    def die(self, *, is_poisoned: bool = False) -> None:
        """SIGKILL."""
        if self.is_alive:
            self._answers.num_other_deaths += bool(self.clients) and not is_poisoned
            self.is_alive = False
            self.state = InstanceState.DEAD
            self._close()
            for task in self._tasks:
                task.cancel()

    def _close(self) -> None:
        self._forget(list(self._owners))
        for client in self.clients:
            client.end()
        self.clients.clear()
        self._leave_group()

    async def _run(self) -> None:
        await asyncio.sleep(LOAD_S)
        await self.may_run()
        if self.state is InstanceState.STARTING:
            self.state = InstanceState.READY
        while self.is_alive:
            await self._has_work.wait()
            await asyncio.sleep(STEP_S)
            await self.may_run()
            self._compute()
            if not self.copies:
                self._has_work.clear()

    async def _beat(self) -> None:
        while self.is_alive:
            await asyncio.sleep(HEARTBEAT_S)
            await self.may_run()
            self.gate.tend()
            for client in self.clients:
                if self._chaos.now_s - client.last_sent_s >= HEARTBEAT_S / 2:
                    self._send(client, [])

    def _compute(self) -> None:
        """One step: a token for each request that fits."""
        self._step += 1
        outputs: dict[InstanceEnd, list[EngineCoreOutput]] = {}
        for wire_id, copy in list(self.copies.items())[: CAPACITY.max_num_seqs]:
            if self._answers.is_poison(copy.number) and copy.num_tokens >= FATAL_TOKEN:
                self._answers.killed(copy.number, self.key, len(self.copies) - 1)
                self.die(is_poisoned=True)
                return
            token, is_last = self._answers.next(copy.number, copy.num_tokens)
            copy.num_tokens += 1
            reason = None
            if is_last:
                reason = FinishReason.LENGTH if copy.number % 2 == 0 else FinishReason.STOP
                del self.copies[wire_id]
            output = EngineCoreOutput(request_id=wire_id, new_token_ids=[token], finish_reason=reason)
            outputs.setdefault(copy.client, []).append(output)
        for client, batch in outputs.items():
            self._send(client, batch)
        self.gate.stepped(chain.from_iterable(outputs.values()), InstanceStats(num_waiting=self._num_waiting))

    # Its ingresses ----------------------------------------------------------------------------------------------------

    def accept(self, ends: tuple[str, str], client_id: str) -> InstanceEnd:
        """An ingress connects."""
        client = InstanceEnd(self._chaos, ends, client_id, self._on_frame)
        self.clients.append(client)
        task = asyncio.get_running_loop().create_task(self._serve(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return client

    async def _serve(self, client: InstanceEnd) -> None:
        try:
            await client.read_all(self.may_run)
        except LinkLostError:
            if client in self.clients:
                self.clients.remove(client)
            self._forget([wire_id for wire_id, owner in self._owners.items() if owner is client])

    def _forget(self, wire_ids: Iterable[str]) -> None:
        for wire_id in wire_ids:
            self.copies.pop(wire_id, None)
            del self._owners[wire_id]
        self.gate.forget(wire_ids)

    def _on_frame(self, client: InstanceEnd, frame: Frame) -> None:
        if frame.kind is FrameKind.ABORT:
            wire_ids = msgspec.msgpack.decode(frame.parts[0], type=list[str])
            self._forget([wire_id for wire_id in wire_ids if self._owners.get(wire_id) is client])
            return
        add = CODEC.decode_add(frame.parts)
        wire_id = add.request.request_id
        number = number_of(wire_id)
        self._answers.check(number, add.output_token_ids, f"instance {self.key} gets {wire_id}")
        self._owners[wire_id] = client
        copy = Copy(number, len(add.output_token_ids), client, wire_id)
        self.gate.take(copy, is_tried_alone=add.is_tried_alone)

    def _let_in(self, copy: Copy) -> None:
        if self._is_follower:
            self._moved([copy.request_id], self.mates[0].key, carried=False, client=copy.client)
            return
        self.copies[copy.request_id] = copy
        self._has_work.set()

    def _tell_trial(self, copy: Copy, is_alone: bool) -> None:
        copy.client.send([msgspec.msgpack.encode(Trial(copy.request_id, is_alone))], FrameKind.TRIAL)

    @property
    def _num_waiting(self) -> int:
        """Requests that were let in and are not in the batch."""
        return max(0, len(self.copies) - CAPACITY.max_num_seqs)

    def _send(self, client: InstanceEnd, outputs: list[EngineCoreOutput]) -> None:
        head = CODEC.encode_stats(self._stats())
        client.send([head, *CODEC.encode_outputs(EngineCoreOutputs(outputs=outputs))])

    def _moved(self, wire_ids: list[str], to: InstanceKey | None, *, carried: bool, client: InstanceEnd) -> None:
        client.send([msgspec.msgpack.encode(Moved(wire_ids, to, carried))], FrameKind.MOVED)

    def _stats(self) -> InstanceStats:
        shape = self.lane.partition("@")[0]
        lane = next((lane.capacity for lane in self._face.lanes if lane.shape == shape), self._face.capacity)
        assert lane is not None
        return InstanceStats(
            step=self._step,
            num_running=len(self.copies),
            num_waiting=self.gate.num_held,
            shape=shape,
            is_follower=self._is_follower,
            block_size=lane.block_size,
            kv_blocks_total=lane.num_blocks,
            kv_blocks_used=len(self.copies),
            max_model_len=lane.max_model_len,
        )

    # Its controllers --------------------------------------------------------------------------------------------------

    def status(self, term: int) -> InstanceSnapshot:
        """As `Instance.status`."""
        self.fence.hear(term)
        is_serving = self.state in (InstanceState.READY, InstanceState.DRAINING)
        names = [spec.name for spec in self._directory.groups if self.key in spec.members]
        said = replace(
            self._face,
            state=self.state,
            endpoint=self.endpoint if is_serving else "",
            capacity=self._face.capacity if is_serving else None,
            failure=self.failure,
            stats=self._stats(),
            lane=self.lane,
            epoch=self.epoch,
            groups_ready=tuple(names) if is_serving else (),
            term=self.fence.newest,
        )
        return self._revisions.numbered(said)

    async def drain(self, timeout_s: float, term: int) -> bool:
        """As `Instance.drain`."""
        self.fence.require(term)
        if self.state is InstanceState.READY:
            self.state = InstanceState.DRAINING
        until_s = self._chaos.now_s + timeout_s
        while self._has_requests and self._chaos.now_s < until_s:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_LOOK_S)
        return not self._has_requests

    @property
    def _has_requests(self) -> bool:
        return bool(self.copies) or self.gate.num_held > 0

    def connect(self, directory: PeerDirectory, term: int) -> None:
        """As `Instance.connect`."""
        self.fence.require(term)
        if directory.version > self._directory.version:
            self._directory = directory

    def prepare(self, plan: SwitchPlan, term: int) -> None:
        """As `Agent.prepare`."""
        self.fence.require(term)
        if self.state is not InstanceState.READY:
            raise StepError(f"instance {self.key} is not ready to change its shape")
        if plan.epoch < self.epoch:
            raise FenceError(f"the plan is for epoch {plan.epoch}, and instance {self.key} is at {self.epoch}")
        self._prepared.add(plan.plan_id)

    async def commit(
        self, plan: SwitchPlan, term: int, find: Callable[[InstanceKey], "ScriptedInstance | None"]
    ) -> SwitchReport:
        """As `Agent.commit`: brings all members along at once, where each is there and has prepared the plan."""
        self.fence.require(term)
        await asyncio.sleep(STEP_S)
        members = [find(key) for key in plan.members]
        for key, member in zip(plan.members, members, strict=True):
            if member is None or not member.may_switch(plan):
                raise StepError(f"instance {key} cannot take part")
        whole = [member for member in members if member is not None]
        _regroup(whole, plan)
        return SwitchReport(plan_id=plan.plan_id, epoch=self.epoch, cutover_s=STEP_S)

    def may_switch(self, plan: SwitchPlan) -> bool:
        """Whether it has prepared `plan` and can answer its leader now."""
        is_here = self.state is InstanceState.READY and self._stopped_until_s <= self._chaos.now_s
        return is_here and plan.plan_id in self._prepared and plan.epoch >= self.epoch

    def abort(self, plan_id: str, term: int) -> None:
        """As `Agent.abort`."""
        self.fence.require(term)
        self._prepared.discard(plan_id)

    def hand_over(self, to: "ScriptedInstance") -> None:
        """All its requests go on at `to`, or are sent again where their ingress is not connected there."""
        going: dict[tuple[InstanceEnd, bool], list[str]] = {}
        for wire_id, copy in list(self.copies.items()):
            there = next((c for c in reversed(to.clients) if c.client_id == copy.client.client_id), None)
            going.setdefault((copy.client, there is not None), []).append(wire_id)
            del self.copies[wire_id]
            if there is not None:
                to.copies[wire_id] = Copy(copy.number, copy.num_tokens, there, wire_id)
                to._owners[wire_id] = there
                to._has_work.set()
        for (client, carried), wire_ids in going.items():
            self._moved(wire_ids, to.key, carried=carried, client=client)

    def take_shape(self, lane: str, mates: tuple["ScriptedInstance", ...], epoch: Epoch, plan_id: str) -> None:
        """Runs `lane` from now on, and tells its ingresses."""
        self.lane, self.mates, self.epoch = lane, mates, epoch
        self._prepared.discard(plan_id)
        for client in self.clients:
            self._send(client, [])
        asyncio.get_running_loop().call_soon(self.gate.requests_moved)  # when all members have theirs

    def _leave_group(self) -> None:
        """A group is broken by its first member that ends: the others go on alone, its requests are sent again."""
        mates, self.mates, self.lane = self.mates, (), "dp"
        for mate in mates:
            if mate is not self and mate.mates:
                mate.fall_back()

    def fall_back(self) -> None:
        """Goes on alone."""
        by_client: dict[InstanceEnd, list[str]] = {}
        for wire_id, copy in self.copies.items():
            by_client.setdefault(copy.client, []).append(wire_id)
        self.copies.clear()
        for client, wire_ids in by_client.items():
            self._moved(wire_ids, None, carried=False, client=client)
        self.take_shape("dp", (), self.epoch, "")

    @property
    def _is_follower(self) -> bool:
        return bool(self.mates) and self.mates[0] is not self


def _regroup(members: list[ScriptedInstance], plan: SwitchPlan) -> None:
    """Carries out a merge or a split of two."""
    leader, epoch = members[0], Epoch(plan.epoch + 1)
    if plan.is_merge:
        for member in members:
            member.take_shape(str(plan.group), tuple(members), epoch, plan.plan_id)
        for member in members[1:]:
            member.hand_over(leader)
        return
    for member in members:
        member.take_shape("dp", (), epoch, plan.plan_id)
    leader.hand_over(members[-1])


def require_alive(instance: ScriptedInstance | None) -> ScriptedInstance:
    """The instance; raises EngineError where its process has ended, as Ray tells it."""
    if instance is None or not instance.is_alive:
        raise EngineError("its process has ended")
    return instance
