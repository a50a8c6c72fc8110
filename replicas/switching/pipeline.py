"""What the members of a running pipeline send each other beside its steps: hidden states, and KV after a drop."""

from collections.abc import Callable

from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.comm.peers import PeerNetwork
from pengserve.replicas.engine.exchange import DropExchange
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.weights_return import WeightsReturn
from pengserve.replicas.switching.member import Member, parts_of
from pengserve.replicas.switching.step_thread import Submit
from pengserve.replicas.switching.wiring import Wiring

HIDDEN = "hidden"  # kind of peer messages that hold what one stage hands on to the next
KV = "kv"  # ... that hold a piece of KV, of requests that run in the group
WEIGHTS = "weights"  # ... that hold a piece of a layer's weights
SETTLED = "settled"  # ... that say that a member has all that a drop or a return of weights brings it

OnBroken = Callable[[BaseException], None]


class PipelineTraffic:
    """One member's side. All messages carry the group's name, so that messages of a failed group are ignored.

    `begin` and `end` belong to the step thread; any thread may call `interrupt`.
    """

    def __init__(self, member: Member, wiring: Wiring, submit: Submit, on_broken: OnBroken) -> None:
        self._member, self._wiring, self._submit, self._on_broken = member, wiring, submit, on_broken
        self._stamp = b""  # of the group that runs; empty where none does
        self._mates: tuple[InstanceKey, ...] = ()
        self._exchange: DropExchange | None = None
        self._return: WeightsReturn | None = None
        self._unsettled: set[InstanceKey] = set()  # leader: members that wait for KV, memory or weights
        self._on_all_settled: Callable[[], None] = lambda: None
        self._stage = b""  # what is under way: the drop (empty), or the id of a restore
        self._early: list[
            tuple[InstanceKey, list[memoryview]]
        ] = []  # weights that came before the message to expect them
        network: PeerNetwork = member.network
        network.subscribe(HIDDEN, self._on_hidden)
        network.subscribe(KV, lambda key, _, parts: submit(lambda: self._take_kv(key, parts)))
        network.subscribe(WEIGHTS, lambda key, _, parts: submit(lambda: self._take_weights(key, parts)))
        network.subscribe(SETTLED, lambda key, _, parts: submit(lambda: self._hear_settled(key, *map(bytes, parts))))

    def begin(self, lane: PpLane, name: str, mates: tuple[InstanceKey, ...], exchange: DropExchange | None) -> None:
        """The group runs, and where it has begun by a drop, KV follows the requests of that beside the steps."""
        self._stamp, self._mates, self._exchange, self._unsettled = name.encode(), mates, exchange, set(mates)
        stamp, network = self._stamp, self._member.network
        lane.stamp, lane.timeout_s = stamp, self._member.timeout_s
        lane.send_hidden = lambda rank, parts: network.send(mates[rank], HIDDEN, [stamp, *parts])
        if exchange is None:
            return
        exchange.send = lambda rank, parts: network.send(mates[rank], KV, [stamp, *parts])
        exchange.on_done = lambda: self._settled(lane)
        self._on_all_settled = lane.arrived
        self._member.lanes.chore = exchange.advance

    def begin_return(
        self,
        lane: PpLane,
        plan: SwitchPlan,
        withheld: list[int],
        on_all_settled: Callable[[], None] = lambda: None,
    ) -> None:
        """The weights that this member misses come back beside the steps, for a restore.

        Args:
            on_all_settled: leader: called when all members have theirs.

        Raises:
            StepError: there is no room for them.
        """
        returning = WeightsReturn(self._member.lanes, lane, parts_of(self._member, plan))
        returning.begin(withheld)
        self._stage = stage = plan.plan_id.encode()
        stamp, mates, network = self._stamp, self._mates, self._member.network
        returning.send = lambda rank, parts: network.send(mates[rank], WEIGHTS, [stamp, stage, *parts])
        returning.on_done = lambda: self._settled(lane)
        lane.is_settled = False
        self._return, self._unsettled, self._on_all_settled = returning, set(mates), on_all_settled
        self._member.lanes.chore = returning.advance
        early, self._early = self._early, []
        for key, parts in early:
            self._take_weights(key, parts)

    def undo_return(self, lane: PpLane) -> None:
        """Where weights were coming back: they do not, and memory is the pipeline's again."""
        if self._return is not None:
            self._return.undo()
            self._return, self._stage = None, b""
            self._member.lanes.chore = None
            self._unsettled = set()
            lane.is_settled = True
            if lane.rank == 0:
                lane.offer_all()

    def end(self) -> None:
        """The group runs no more."""
        self._stamp, self._mates, self._stage, self._early = b"", (), b"", []
        self._exchange, self._return = None, None

    def interrupt(self) -> None:
        """Ends a wait for another stage."""
        lane = self._member.lanes.running
        if isinstance(lane, PpLane):
            lane.inbox.interrupt()

    def _on_hidden(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        """In a reader thread; may come before this member has heard that the group runs."""
        stamp = bytes(parts[0])
        lane = self._member.lanes.find(self._wiring.group_named(str(stamp, "utf-8")))
        if isinstance(lane, PpLane):
            lane.inbox.put(stamp, parts[1:])

    def _take_kv(self, key: InstanceKey, parts: list[memoryview]) -> None:
        if self._exchange is None or bytes(parts[0]) != self._stamp:
            return
        try:
            self._exchange.receive(self._mates.index(key), parts[1:])
        except (EngineError, ValueError) as error:
            self._on_broken(error)

    def _take_weights(self, key: InstanceKey, parts: list[memoryview]) -> None:
        if bytes(parts[0]) != self._stamp:
            return
        if bytes(parts[1]) != self._stage or self._return is None:
            # Of a restore that this member has not heard of yet, or not any more.
            self._early = [early for early in self._early if early[1][1] == parts[1]] + [(key, parts)]
            return
        try:
            self._return.receive(self._mates.index(key), parts[2:])
        except (EngineError, ValueError) as error:
            self._on_broken(error)

    def _settled(self, lane: PpLane) -> None:
        """All that this member needs has come."""
        lane.is_settled = self._return is None  # with all weights, its memory is not that of a stage any more
        leader, own = self._mates[0], self._member.key
        if leader == own:
            self._hear_settled(own, self._stamp, self._stage)
        else:
            self._member.network.send(leader, SETTLED, [self._stamp, self._stage])

    def _hear_settled(self, key: InstanceKey, stamp: bytes, stage: bytes) -> None:
        """Leader: once all members have said so, what waited for it goes on."""
        if (stamp, stage) == (self._stamp, self._stage) and key in self._unsettled:
            self._unsettled.discard(key)
            if not self._unsettled:
                self._on_all_settled()
