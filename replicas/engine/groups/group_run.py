"""One run of a group: from the commit that begins it until it ends or breaks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.comm.communicator import Communicator

STEP = "step"  # kind of peer messages that hold a step of the leader's
HIDDEN = "hidden"  # ... that hold what one stage of a pipeline hands on to the next


class Post(Protocol):
    """Sends messages to other instances: `comm.peers.PeerNetwork`."""

    def send(self, key: InstanceKey, kind: str, parts: Sequence[Buffer]) -> None:
        """Raises LinkLostError where that instance is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRun:
    """What a lane is entered with: who takes part, and how they reach each other.

    Every message begins with the stamp of its run, so that messages of a run that has ended are ignored.
    """

    communicator: Communicator
    seed: int  # of the lane's random state: the same on all members, another for each run
    post: Post

    @property
    def name(self) -> str:
        """Of the group's communicators; another one in each round of building them."""
        return self.communicator.name

    @property
    def stamp(self) -> bytes:
        """First part of every message."""
        return self.name.encode()

    @property
    def members(self) -> tuple[InstanceKey, ...]:
        """In rank order; the first leads."""
        return self.communicator.members

    @property
    def leader(self) -> InstanceKey:
        """The member that schedules."""
        return self.members[0]

    @property
    def timeout_s(self) -> float:
        """For so long a member may be silent."""
        return self.communicator.timeout_s

    def send(self, rank: int, kind: str, parts: Sequence[Buffer]) -> None:
        """Sends a message to one member.

        Raises:
            LinkLostError: it is gone.
        """
        self.post.send(self.members[rank], kind, [self.stamp, *parts])

    def send_step(self, parts: Sequence[Buffer]) -> None:
        """Leader: sends a step to all others. Raises as `send`."""
        for rank in range(1, len(self.members)):
            self.send(rank, STEP, parts)
