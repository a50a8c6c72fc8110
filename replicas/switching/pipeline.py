"""What members of a running pipeline send each other beside its steps: KV after a drop, weights before a restore."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pengserve.planners.types.errors import EngineError, PengServeError, StepError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.comm.bulk import Landed
from pengserve.replicas.engine.groups.group_run import HIDDEN, GroupRun
from pengserve.replicas.engine.groups.pp_lane import PpLane
from pengserve.replicas.engine.movers.exchange import DropExchange
from pengserve.replicas.engine.movers.weights_return import WeightsReturn
from pengserve.replicas.kv.channel import BulkChannel, Channel, PeerChannel
from pengserve.replicas.switching.failpoints import reached
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.step_thread import Submit
from pengserve.replicas.switching.wiring import Wiring

PIECE = "piece"  # kind of peer messages that hold a piece of KV, or of a layer's weights
COMING = "coming"  # ... that announce one, which comes by the group's ways (`comm/bulk.py`)
SETTLED = "settled"  # ... that say that a member has all that a movement brings it

OnBroken = Callable[[BaseException], None]
_Parts = Sequence[Buffer | Landed]
"""Stamp of the run, id of the movement, header of the piece, its bytes."""


@dataclass(eq=False)
class _Movement:
    """Memory of the pipeline that changes hands beside its steps."""

    id: bytes  # of a restore its plan's; empty for a drop's, with which the group begins
    lane: PpLane
    run: GroupRun
    mover: DropExchange | WeightsReturn
    on_all_settled: Callable[[], None]  # leader

    def __post_init__(self) -> None:
        self.unsettled = set(self.run.members)  # leader: members to which something has still to come


class PipelineTraffic:
    """One member's side; one movement at a time.

    `begin` and `end` belong to the step thread; any thread may call `interrupt`.
    """

    def __init__(self, member: Member, wiring: Wiring, submit: Submit, on_broken: OnBroken) -> None:
        self._member, self._wiring, self._submit, self._on_broken = member, wiring, submit, on_broken
        self._run: GroupRun | None = None
        self._lane: PpLane | None = None
        self._movement: _Movement | None = None
        self._early: list[tuple[InstanceKey, _Parts]] = []  # pieces of a restore not heard of yet
        network = member.network
        network.subscribe(HIDDEN, self._on_hidden)
        network.subscribe(PIECE, lambda key, _, parts: submit(lambda: self._take(key, parts)))
        network.subscribe(COMING, self._on_coming)
        network.subscribe(SETTLED, lambda key, _, parts: submit(lambda: self._hear_settled(key, *map(bytes, parts))))

    def begin(self, lane: PpLane, run: GroupRun, exchange: DropExchange | None) -> None:
        """The group runs, and where it has begun by a drop, KV follows the requests of that beside the steps."""
        self._run, self._lane = run, lane
        if exchange is not None:
            self._start(_Movement(b"", lane, run, exchange, lane.arrived))

    def makes_room(self, plan: SwitchPlan) -> bool:
        """Leader: whether requests are leaving the devices so that `lead_return` finds room for the weights."""
        return self._lane is not None and self._lane.makes_room(self._member.parts_of(plan))

    def lead_return(
        self, plan: SwitchPlan, tell: Callable[[list[int]], None], on_all_settled: Callable[[], None]
    ) -> None:
        """Leader: as `begin_return`, once blocks have been given up to make room for the weights.

        Args:
            tell: tells the others which blocks.
            on_all_settled: called when all members have their weights.

        Raises:
            StepError: there is no room. LinkLostError: a member is gone. All is as it was.
        """
        assert self._lane is not None
        withheld = self._lane.give_up_blocks(self._member.parts_of(plan))
        try:
            tell(withheld)
            reached("returning")
            self.begin_return(plan, withheld, on_all_settled)
        except PengServeError:
            self._lane.offer_all()
            raise

    def begin_return(
        self, plan: SwitchPlan, withheld: list[int], on_all_settled: Callable[[], None] = lambda: None
    ) -> None:
        """The weights that this member misses come back beside the steps, into the memory of the `withheld` blocks.

        Raises:
            StepError: there is no room for them.
        """
        if self._run is None or self._lane is None:
            raise StepError(f"instance {self._member.key} runs no pipeline")
        returning = WeightsReturn(self._member.lanes, self._lane, self._member.parts_of(plan))
        try:
            returning.begin(withheld)
        except BaseException:
            returning.undo()  # no movement is noted that `undo_return` could undo
            raise
        self._start(_Movement(plan.plan_id.encode(), self._lane, self._run, returning, on_all_settled))
        early, self._early = self._early, []
        for key, parts in early:
            self._take(key, parts)

    def _start(self, movement: _Movement) -> None:
        self._movement, run = movement, movement.run
        movement.lane.note_settled(False)
        movement.mover.start(self._channel(movement, run), lambda: self._settled(movement))

    def _channel(self, movement: _Movement, run: GroupRun) -> Channel:
        def send(kind: str, rank: int, parts: Sequence[Buffer]) -> None:
            run.send(rank, kind, [movement.id, *parts])

        ways = self._member.pool.bulk(run.name)
        if ways is None:
            return PeerChannel(partial(send, PIECE))
        return BulkChannel(ways, partial(send, COMING), partial(send, PIECE))

    def undo_return(self, plan_id: str) -> None:
        """Where weights were coming back for this plan: they do not, and memory is the pipeline's again."""
        movement = self._movement
        if movement is not None and movement.id == plan_id.encode() and isinstance(movement.mover, WeightsReturn):
            movement.mover.undo()
            self._movement = None
            movement.lane.note_settled(True)
            if movement.lane.leads:
                movement.lane.offer_all()

    def end(self) -> None:
        """The group runs no more."""
        self._run = self._lane = self._movement = None
        self._early = []

    def interrupt(self) -> None:
        """Ends a wait for another stage."""
        if (lane := self._lane) is not None:
            lane.inbox.interrupt()

    def _on_hidden(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        """In a reader thread; may come before this member has heard that the group runs."""
        stamp = bytes(parts[0])
        lane = self._member.lanes.registry.find(self._wiring.group_named(str(stamp, "utf-8")))
        if isinstance(lane, PpLane):
            lane.inbox.put(stamp, parts[1:])

    def _on_coming(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        """In a reader thread. The piece is received in another one, whichever movement it is of: its sender goes on
        with the next one then.
        """
        stamp, movement_id, head, num_bytes = parts
        ways = self._member.pool.bulk(str(stamp, "utf-8"))
        if ways is not None:
            ways.receive(
                ways.members.index(key),
                int(bytes(num_bytes)),
                lambda landed: self._submit(lambda: self._take(key, [stamp, movement_id, head, landed])),
                lambda error: self._submit(lambda: self._fail(stamp, error)),
            )

    def _take(self, key: InstanceKey, parts: _Parts) -> None:
        if self._run is None or parts[0] != self._run.stamp:
            return
        movement = self._movement
        if movement is None or parts[1] != movement.id:
            # Of a restore that this member has not heard of yet, or not any more.
            self._early = [early for early in self._early if early[1][1] == parts[1]] + [(key, parts)]
            return
        piece = [part.take() if isinstance(part, Landed) else part for part in parts[2:]]
        try:
            movement.mover.receive(self._run.members.index(key), piece)
        except (EngineError, ValueError) as error:
            self._on_broken(error)

    def _fail(self, stamp: Buffer, error: EngineError) -> None:
        """A piece that was announced does not come."""
        if self._run is not None and stamp == self._run.stamp:
            self._on_broken(error)

    def _settled(self, movement: _Movement) -> None:
        """All that this member needs has come. With all weights, its memory is not that of a stage any more."""
        movement.lane.note_settled(isinstance(movement.mover, DropExchange))
        if movement.lane.leads:
            self._hear_settled(self._member.key, movement.run.stamp, movement.id)
        else:
            movement.run.send(0, SETTLED, [movement.id])

    def _hear_settled(self, key: InstanceKey, stamp: bytes, movement_id: bytes) -> None:
        """Leader: once all members have said so, what waited for it goes on."""
        movement = self._movement
        if movement is None or (stamp, movement_id) != (movement.run.stamp, movement.id):
            return
        if key in movement.unsettled:
            movement.unsettled.discard(key)
            if not movement.unsettled:
                movement.on_all_settled()
