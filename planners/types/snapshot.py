"""What is known of the cluster at one moment. Planners read these and nothing else.

All values are frozen. Counts are instantaneous, names that begin with `total_` only grow within one incarnation.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.layout import Layout
from pengserve.planners.types.units import blocks_for


class InstanceState(StrEnum):
    """Where an instance is in its life. Only READY ones take new requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCapacity:
    """What an instance can hold. Fixed once the engine has started (until a drop plan grows it)."""

    num_blocks: int
    block_size: int  # tokens in a block
    bytes_per_block: int  # over all layers
    max_model_len: int  # tokens of prompt and output together
    max_num_seqs: int
    weight_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens of KV that fit."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStats:
    """One instance's load, taken at a step boundary and sent with every token batch."""

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_used: int = 0  # blocks that running requests hold
    queued_tokens: int = 0  # KV tokens that waiting requests will need for what they already have
    total_prompt_tokens: int = 0
    total_generated_tokens: int = 0
    total_preemptions: int = 0
    total_prefix_queries: int = 0  # tokens looked up in the prefix cache
    total_prefix_hits: int = 0  # tokens found there
    total_resumed: int = 0  # requests taken over from a lost instance
    last_step_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """Where an instance runs."""

    node_id: str = ""
    node_ip: str = "127.0.0.1"
    device: str = "cpu"  # "cpu", or "cuda:<index on the node>"
    pid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSnapshot:
    """All that is known of one instance."""

    key: InstanceKey
    state: InstanceState
    endpoint: str = ""  # "host:port" of its request channel, empty until it is ready
    device: DeviceInfo = field(default_factory=DeviceInfo)
    capacity: KvCapacity | None = None  # None until it is ready
    stats: InstanceStats = field(default_factory=InstanceStats)
    lanes: tuple[str, ...] = ("dp",)  # shapes it can run
    lane: str = "dp"  # the one it runs
    rss_bytes: int = 0
    failure: str = ""  # why it is DEAD, or why the slot's life before it ended; one sentence for people

    @property
    def instance_id(self) -> InstanceId:
        """The slot this instance fills."""
        return self.key.instance_id

    @property
    def virtual_kv_blocks(self) -> int:
        """Virtual KV load in blocks: what is resident plus what the queue will need."""
        if self.capacity is None:
            return 0
        return self.stats.kv_blocks_used + blocks_for(self.stats.queued_tokens, self.capacity.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """The whole application at one moment."""

    app: str
    time_s: float  # seconds since the Unix epoch
    layout: Layout
    instances: tuple[InstanceSnapshot, ...]  # by instance id
    routing_version: int = 0
    controller_started_s: float = 0.0
    ranks: tuple[InstanceId, ...] = ()  # slots by node and device; a topology-valid group is a run of these

    @property
    def epoch(self) -> Epoch:
        """Version of the layout."""
        return self.layout.epoch

    def instance(self, instance_id: InstanceId) -> InstanceSnapshot | None:
        """The instance that fills the slot now, or None."""
        return next((i for i in self.instances if i.instance_id == instance_id), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One place that requests can be sent to: the leader of a group."""

    key: InstanceKey
    endpoint: str  # "host:port"
    members: tuple[InstanceId, ...]
    shape: str  # "dp", "tp2", "pp2", ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """Where requests may go. `version` grows with every change; an ingress never goes back to an older one."""

    version: int
    epoch: Epoch
    routes: tuple[Route, ...]
    is_draining: bool = False  # the application ends: no ingress takes new requests
