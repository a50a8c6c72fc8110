"""Who the peers of an instance are, and which groups of them must be ready to cooperate."""

from dataclasses import dataclass

from pengserve.planners.types.ids import InstanceKey, Version
from pengserve.planners.types.layout import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """Where one life of an instance listens for its peers."""

    key: InstanceKey
    endpoint: str  # "host:port"

    @property
    def host(self) -> str:
        """The machine's address."""
        return self.endpoint.rpartition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A group that must be able to run. Its members build its communicators before a switch needs them."""

    group: Group
    members: tuple[InstanceKey, ...]  # in rank order
    round: int = 0  # grows when a group of the same members must be built anew, after one of its calls failed

    @property
    def name(self) -> str:
        """Unique for these lives and this round, e.g. "tp2@(0,1)/0.1-1.3/0"."""
        return f"{self.group}/{'-'.join(map(str, self.members))}/{self.round}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDirectory:
    """What the controller tells every instance whenever an instance comes or goes. A newer version replaces all."""

    version: Version
    peers: tuple[PeerAddress, ...]
    groups: tuple[GroupSpec, ...]

    def num_beside(self, key: InstanceKey) -> int:
        """Instances on the machine of this one, itself among them; 0 where it is not listed."""
        hosts = [peer.host for peer in self.peers]
        return sum(hosts.count(peer.host) for peer in self.peers if peer.key == key)
