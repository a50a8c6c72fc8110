"""The group that runs here: its name and members, its steps, and how it ends where it cannot go on."""

import contextlib
from collections.abc import Callable, Sequence

from pengserve.planners.types.errors import LinkLostError
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.exchange import DropExchange
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.pipeline import OnBroken, PipelineTraffic
from pengserve.replicas.switching.step_thread import Submit
from pengserve.replicas.switching.wiring import Wiring

STEP = "step"  # kind of peer messages that hold a step of the leader's
BROKEN = "broken"  # ... that name a group which its members must leave at once


class RunningGroup:
    """Belongs to the step thread, but for what `PipelineTraffic` says of itself."""

    def __init__(self, member: Member, wiring: Wiring, submit: Submit, on_broken: OnBroken) -> None:
        self._member = member
        self.name = ""  # of the group's communicators; empty in dp
        self.mates: tuple[InstanceKey, ...] = ()  # its members, in rank order
        self.pipeline = PipelineTraffic(member, wiring, submit, on_broken)

    @property
    def leader(self) -> InstanceKey | None:
        """Who leads it; None in dp."""
        return self.mates[0] if self.mates else None

    def begin(self, name: str, mates: tuple[InstanceKey, ...], exchange: DropExchange | None = None) -> None:
        """This member runs in a group now; of a drop, `exchange` goes on. The leader sends its steps from now on."""
        self.end()
        self.name, self.mates = name, mates
        lane = self._member.lanes.running
        if isinstance(lane, PpLane):
            self.pipeline.begin(lane, name, mates, exchange)
        if mates[0] == self._member.key:
            assert lane is not None
            lane.on_step = self._sender(lane.followers)

    def end(self) -> None:
        """This member is alone."""
        self.name, self.mates = "", ()
        self.pipeline.end()

    def end_if_gone(self) -> None:
        """Where a switch failed half-way and ended this member's lane, the other members must leave the group too."""
        if self.name and self._member.lanes.running is None:
            end_group(self._member, self.name, self.mates)
            self.end()

    def follow(self, parts: list[memoryview]) -> None:
        """Executes a step, if it is one of this group."""
        if self._member.lanes.is_following and bytes(parts[0]) == self.name.encode():
            self._member.lanes.follow(parts[1:])

    def _sender(self, followers: Sequence[InstanceKey]) -> Callable[[Sequence[Buffer]], None]:
        stamp, network = self.name.encode(), self._member.network

        def send(parts: Sequence[Buffer]) -> None:
            for key in followers:
                network.send(key, STEP, [stamp, *parts])

        return send


def tell_broken(member: Member, name: str, mates: Sequence[InstanceKey]) -> None:
    """Tells the others that a group has no future; they leave it, where they are in it."""
    for key in mates:
        if key != member.key:
            with contextlib.suppress(LinkLostError):  # it sees the end of the connection
                member.network.send(key, BROKEN, [name.encode()])


def end_group(member: Member, name: str, mates: Sequence[InstanceKey]) -> None:
    """No member may stay in a group that one has left: it would wait for ever for the next step."""
    member.pool.mark_failed(name)  # also frees members that wait in a collective
    tell_broken(member, name, mates)
