"""What a member of a group needs to take part in a switch."""

import queue
from dataclasses import dataclass, field
from typing import Protocol

from pengserve.planners.stages import Parts
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.comm.peers import PeerNetwork
from pengserve.replicas.comm.pool import CommunicatorPool
from pengserve.replicas.engine.instance_lanes import Lanes
from pengserve.replicas.engine.lanes.handoff import Handoff
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.switching.messages import SwitchMessage

SWITCH = "switch"  # kind of peer messages that are `SwitchMessage`s


class RequestOwner(Protocol):
    """Knows the ingress of each request. Called in the step thread."""

    def handoff(self, request: Request) -> Handoff | None:
        """The request as it can travel; None where its ingress is gone."""

    def serves(self, client_id: str) -> bool:
        """Whether that ingress is connected here."""

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

    def parts_of(self, plan: SwitchPlan) -> Parts:
        """The parts that the plan's pipeline is formed of, or ends in."""
        assert self.lanes.dp.memory is not None
        num_layers = self.lanes.dp.memory.layers.sizes.num_layers
        return Parts(num_layers, tuple(part.degree for part in plan.parts))
