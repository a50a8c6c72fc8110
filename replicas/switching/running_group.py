"""The group that runs here: its steps, and how it ends where it cannot go on."""

import contextlib

from pengserve.planners.types.errors import LinkLostError
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.engine.groups.group_run import GroupRun
from pengserve.replicas.engine.groups.pp_lane import PpLane
from pengserve.replicas.engine.movers.exchange import DropExchange
from pengserve.replicas.switching.member import Member
from pengserve.replicas.switching.pipeline import OnBroken, PipelineTraffic
from pengserve.replicas.switching.step_thread import Submit
from pengserve.replicas.switching.wiring import Wiring

BROKEN = "broken"  # kind of peer messages that name a run which its members must leave at once


class RunningGroup:
    """Belongs to the step thread, but for what `PipelineTraffic` says of itself."""

    def __init__(self, member: Member, wiring: Wiring, submit: Submit, on_broken: OnBroken) -> None:
        self._member, self._on_broken = member, on_broken
        self.run: GroupRun | None = None  # None in dp
        self.pipeline = PipelineTraffic(member, wiring, submit, on_broken)

    @property
    def name(self) -> str:
        """Of the group's communicators; empty in dp."""
        return self.run.name if self.run is not None else ""

    @property
    def members(self) -> tuple[InstanceKey, ...]:
        """In rank order; empty in dp."""
        return self.run.members if self.run is not None else ()

    @property
    def leader(self) -> InstanceKey | None:
        """Who leads it; None in dp."""
        return self.run.leader if self.run is not None else None

    @property
    def led_here(self) -> tuple[InstanceKey, ...]:
        """The members that this one leads; empty also in dp."""
        return self.members[1:] if self.leader == self._member.key else ()

    def begin(self, run: GroupRun, exchange: DropExchange | None = None) -> None:
        """This member runs in a group now; of a drop, `exchange` goes on."""
        self.end()
        self.run, lane = run, self._member.lanes.running
        if isinstance(lane, PpLane):
            self.pipeline.begin(lane, run, exchange)

    def end(self) -> None:
        """This member is alone."""
        self.run = None
        self.pipeline.end()

    def follow(self, parts: list[memoryview]) -> None:
        """Executes a step, if it is one of this run."""
        if self._member.lanes.stepper.is_following and bytes(parts[0]) == self.name.encode():
            self._member.lanes.stepper.follow(parts[1:])

    # Before a switch --------------------------------------------------------------------------------------------------

    def stop(self) -> bool:
        """Leader: begins no more steps; whether none is in flight, so that the others have their last one."""
        lane = self._member.lanes.running
        assert lane is not None
        lane.hold(True)
        return not lane.num_in_flight

    def go_on(self) -> None:
        """Leader: where a switch does not happen, steps begin again."""
        lane = self._member.lanes.running
        if lane is not None:
            lane.hold(False)

    # The end ----------------------------------------------------------------------------------------------------------

    def break_off(self, error: BaseException) -> None:
        """The group cannot go on: this member is in dp at once, and tells the others."""
        self._on_broken(error)

    def end_if_gone(self) -> None:
        """Where a switch failed half-way and ended this member's lane, the other members must leave the group too."""
        if self.run is not None and self._member.lanes.running is None:
            end_run(self._member, self.run)
            self.end()


def end_run(member: Member, run: GroupRun) -> None:
    """No member may stay in a group that one has left: it would wait for ever for the next step."""
    member.pool.mark_failed(run.name)  # also frees members that wait in a collective
    for key in run.members:
        if key != member.key:
            with contextlib.suppress(LinkLostError):  # it sees the end of the connection
                member.network.send(key, BROKEN, [run.name.encode()])
