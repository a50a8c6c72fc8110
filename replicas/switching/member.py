"""What a member of a group needs to take part in a switch, and the conversation it has then."""

import logging
import queue
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from pengserve.planners.stages import Parts
from pengserve.planners.types.errors import EngineError, LinkLostError, StepError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.comm.peers import PeerNetwork
from pengserve.replicas.comm.pool import CommunicatorPool
from pengserve.replicas.engine.handoff import Handoff
from pengserve.replicas.engine.lanes import Lanes
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.switching.messages import MessageKind, SwitchCodec, SwitchMessage

logger = logging.getLogger(__name__)

SWITCH = "switch"  # kind of peer messages that are `SwitchMessage`s


class RequestOwner(Protocol):
    """Knows the ingress of each request. Called in the step thread."""

    def handoff(self, request: Request) -> Handoff | None:
        """The request as it can travel; None where its ingress is gone."""

    def welcome(self, handoff: Handoff) -> int | None:
        """Takes note of a request that came from a peer: its client index; None where its ingress is not here."""

    def moved(self, request_ids: list[str], to: InstanceKey | None, *, carried: bool) -> None:
        """Tells ingresses that these requests are no longer here (see `wire.Moved`)."""


@dataclass
class Member:
    """One instance's side of all switches."""

    key: InstanceKey
    lanes: Lanes
    network: PeerNetwork
    pool: CommunicatorPool
    owner: RequestOwner
    timeout_s: float
    inbox: "queue.SimpleQueue[tuple[InstanceKey, SwitchMessage | None]]" = field(default_factory=queue.SimpleQueue)


class Conversation:
    """Messages of one plan, from one member's side. While it waits, the step thread does nothing else."""

    def __init__(self, member: Member, plan: SwitchPlan) -> None:
        self.member, self.plan = member, plan
        self.rank = plan.members.index(member.key)
        self._codec = SwitchCodec()

    @property
    def followers(self) -> tuple[InstanceKey, ...]:
        """All members but the leader."""
        return self.plan.members[1:]

    def say(self, to: InstanceKey, kind: MessageKind, **fields: Any) -> None:
        """Sends one message.

        Raises:
            LinkLostError: that member is gone.
        """
        message = SwitchMessage(kind=kind, plan_id=self.plan.plan_id, **fields)
        self.member.network.send(to, SWITCH, self._codec.encode(message))

    def tell_all(self, kind: MessageKind, **fields: Any) -> None:
        """Sends one message to every follower.

        Raises:
            LinkLostError: one of them is gone; others may have been told.
        """
        for key in self.followers:
            self.say(key, kind, **fields)

    def cancel(self, why: str) -> None:
        """Tells all other members that the plan is cancelled, and why. Never raises."""
        for key in self.plan.members:
            if key != self.member.key:
                try:
                    self.say(key, MessageKind.CANCEL, why=why)
                except LinkLostError:
                    logger.debug("instance %s is gone and gets no CANCEL", key)

    def hear(self, *kinds: MessageKind) -> tuple[InstanceKey, SwitchMessage]:
        """The next message of this plan.

        Raises:
            StepError: it is a CANCEL, or none came in time.
            EngineError: a member is gone, or says what does not belong here.
        """
        deadline_s = time.monotonic() + self.member.timeout_s
        while True:
            try:
                key, message = self.member.inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise StepError(f"no {' or '.join(kinds)} message came within {self.member.timeout_s:g} s") from None
            if message is None:
                if key in self.plan.members:
                    raise EngineError(f"instance {key} was lost during the switch")
            elif message.plan_id == self.plan.plan_id:
                if message.kind is MessageKind.CANCEL:
                    raise StepError(message.why)
                if message.kind not in kinds:
                    raise EngineError(f"instance {key} sent {message.kind} where {' or '.join(kinds)} was due")
                return key, message

    def gather(self, kind: MessageKind) -> dict[InstanceKey, SwitchMessage]:
        """One message of every follower. Raises as `hear`."""
        heard: dict[InstanceKey, SwitchMessage] = {}
        while len(heard) < len(self.followers):
            key, message = self.hear(kind)
            heard[key] = message
        return heard


def parts_of(member: Member, plan: SwitchPlan) -> Parts:
    """The parts that a pipeline is formed of, or ends in."""
    assert member.lanes.dp.memory is not None
    num_layers = member.lanes.dp.memory.layers.sizes.num_layers
    return Parts(num_layers, tuple(part.degree for part in plan.parts))


def empty_inbox(member: Member, plan: SwitchPlan) -> None:
    """Forgets kinds of other switches. One of this switch may have come already: that it is called off."""
    connected = member.network.peers()
    for _ in range(member.inbox.qsize()):
        key, message = member.inbox.get_nowait()
        if key not in connected if message is None else message.plan_id == plan.plan_id:
            member.inbox.put((key, message))
