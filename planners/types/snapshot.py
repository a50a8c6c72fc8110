"""What is known of the cluster at one moment. Planners read these and nothing else.

All values are frozen. Counts are instantaneous, names that begin with `total_` only grow within one incarnation.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property, lru_cache
from operator import attrgetter
from struct import Struct
from typing import TYPE_CHECKING, Any

from pengserve.planners.types.codec import from_data, to_data
from pengserve.planners.types.ids import NO_VERSION, Epoch, InstanceId, InstanceKey, Version
from pengserve.planners.types.layout import Group, Layout
from pengserve.planners.types.placements import PlacementNote
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.step_cost import STEP_TOKENS, StepCost


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

    def __reduce__(self) -> tuple[Any, ...]:
        return _capacity, tuple(getattr(self, name) for name in self.__slots__)


STEP_GRACE_S = 15.0


@dataclass(frozen=True, kw_only=True)  # no slots: see `of`
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
    total_migrated: int = 0  # requests that left for another instance with their KV, while both served,
    total_migrated_bytes: int = 0  # ... and that KV
    total_requests: int = 0  # requests that came, without those that another instance had before
    total_request_tokens: int = 0  # ... and the tokens of their prompts
    total_sent_back: int = 0  # requests that went back to ingresses, to be sent again,
    total_sent_again: int = 0  # ... and that came here so
    total_finished: int = 0  # requests that ended here
    total_finished_tokens: int = 0  # ... and the tokens that they generated
    # How often prompts were not read in the order in which they came.
    total_departures_by_band: int = 0  # steps in which one gave way to a more urgent one
    total_departures_by_length: int = 0  # steps in which a short one overtook a long one
    total_departures_by_lateness: int = 0  # times that those that wait were put in order, as some were late
    total_departures_by_memory: int = 0  # times that a long answer gave way to a prompt that waited for memory
    total_short_first_steps: int = 0  # steps that read only the beginning of one, as the instance had been idle
    # What steps computed and took (`StepCost`); of a pipeline, what its stages took together, idle or not.
    total_costed_steps: int = 0
    total_step_us: int = 0
    total_step_tokens: int = 0
    total_step_extra_tokens: int = 0
    total_step_seqs: int = 0
    total_step_context: int = 0
    total_step_pairs: int = 0
    last_step_s: float = 0.0
    shape: str = "dp"  # what it runs now: "dp", "tp2", ...; the fields below and all block counts are of this shape
    is_follower: bool = False  # executes the steps of another instance's lane, and takes no requests
    block_size: int = 0  # tokens in a block; 0 until the first stats
    kv_blocks_total: int = 0  # blocks that this shape can have
    max_model_len: int = 0  # tokens a request may have in this shape
    longest_tokens: int = 0  # of the running request with the most tokens, now
    num_paused: int = 0  # requests that wait in a lane that is not stepped (hard preemption)
    total_stage_busy_s: float = 0.0  # that its stages of pipelines computed
    total_stage_idle_s: float = 0.0  # ... and stood idle between microbatches while the pipeline had work
    # A host tier of KV: zeros where the instance has none.
    num_parked: int = 0  # of `num_waiting`: they have left the batch with their KV kept, until the device has room
    device_blocks: int = 0  # blocks that the device holds in all layers; `kv_blocks_total` is of both tiers
    device_blocks_used: int = 0
    host_blocks: int = 0
    host_blocks_used: int = 0
    total_parked: int = 0
    total_displaced: int = 0  # of these, for a more urgent request that took their place in the batch
    total_host_hits: int = 0  # of `total_prefix_hits`, tokens whose KV was on the host
    total_staged_bytes: int = 0  # copied to the device for a step that waited for them
    total_brought_bytes: int = 0  # ... beside the steps, for requests that came back
    total_evicted_bytes: int = 0  # copied to the host because their place was needed
    total_behind_bytes: int = 0  # ... before it was
    total_reused_bytes: int = 0  # left the device without a copy, as the host had one
    total_copy_wait_s: float = 0.0  # that layers waited for their copies
    # Of the step or command under way, in heartbeats and answers alone; 0 while the step loop comes on.
    step_age_s: float = 0.0
    step_limit_s: float = 0.0  # the age beyond which the instance gives up
    prefilling_tokens: int = 0  # of running requests: those that are not computed yet
    total_prefix_predicted: int = 0  # tokens that ingresses expected in the prefix cache
    # Of `num_waiting`: they hold KV and go on with it, once all of it has come after a drop, or a slot is free.
    num_holding: int = 0
    num_preempted: int = 0  # of `num_waiting`: they had begun to answer, and their KV must be computed again,
    preempted_tokens: int = 0  # ... and the tokens of these answers
    # Tokens that running requests have generated: of six of them, evenly spaced (`types.ages`).
    age_1: int = 0
    age_2: int = 0
    age_3: int = 0
    age_4: int = 0
    age_5: int = 0
    age_6: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "InstanceStats":
        """As the constructor. Each step of an instance makes one, and a frozen dataclass sets its fields one by one:
        that took a quarter of a per cent of a small model's step.

        Raises:
            TypeError: a name that no field has.
        """
        made = object.__new__(cls)
        found = made.__dict__
        found.update(_NO_LOAD)
        found.update(values)
        if len(found) != len(_NO_LOAD):
            raise TypeError(f"no fields of {cls.__name__}: {', '.join(found.keys() - _NO_LOAD.keys())}")
        return made

    @cached_property
    def packed(self) -> bytes:
        """Its numbers, eight bytes each: whole ones in the order of `NUMBERS`, of which columns of a thousand are made,
        then the others.

        They travel so, and stay so until one of them is asked for: of a thousand answers few ever are.
        """
        return _PACKED.pack(*_packed_of(self))

    if not TYPE_CHECKING:  # else any name would do

        def __getattr__(self, name: str) -> Any:
            """A number of an answer that came off a wire: unpacks all of them, and is not called again."""
            found = self.__dict__
            if name not in _PACKED_NAMES or "packed" not in found:
                raise AttributeError(f"{type(self).__name__} has no {name}")
            found.update(zip(_PACKED_NAMES, _PACKED.unpack(found["packed"]), strict=True))
            found["is_follower"] = bool(found["is_follower"])
            return found[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return _stats, (self.packed, self.shape, self.step_age_s)

    @property
    def hang(self) -> str:
        """Why the instance counts as dead though its other threads live, or an empty string.

        The instance itself gives up at the limit. Others wait `STEP_GRACE_S` longer, for its own watch may hang too.
        """
        if not self.step_age_s or self.step_age_s <= self.step_limit_s + STEP_GRACE_S:
            return ""
        return f"a step hangs for {self.step_age_s:.0f} s, and {self.step_limit_s:.0f} s is the limit"


_NO_LOAD: Mapping[str, Any] = dict(vars(InstanceStats()))
NUMBERS = tuple(name for name, value in _NO_LOAD.items() if isinstance(value, int))
_ASKED = ("shape", "step_age_s")  # of each answer
_PACKED_NAMES = (*NUMBERS, *(name for name in _NO_LOAD if name not in (*NUMBERS, *_ASKED)))
_packed_of = attrgetter(*_PACKED_NAMES)
_PACKED = Struct(f"={len(NUMBERS)}q{len(_PACKED_NAMES) - len(NUMBERS)}d")
PACKED_WIDTH = len(_PACKED_NAMES)  # of eight bytes
for _name in _PACKED_NAMES:
    delattr(InstanceStats, _name)  # the default, which would be found before `__getattr__` is asked


def _stats(packed: bytes, shape: str, step_age_s: float) -> InstanceStats:
    made = object.__new__(InstanceStats)
    made.__dict__.update(packed=packed, shape=sys.intern(shape), step_age_s=step_age_s)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """Where an instance runs."""

    node_id: str = ""
    node_ip: str = "127.0.0.1"
    device: str = "cpu"  # "cpu", or "cuda:<index on the node>"
    pid: int = 0
    domain: str = ""  # devices of a node with the same name here are linked best (`planners/device_links.py`)

    def __reduce__(self) -> tuple[Any, ...]:
        return _device, (self.node_id, self.node_ip, self.device, self.pid, self.domain)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneInfo:
    """A shape that an instance can run, alone or with others."""

    shape: str  # "dp", "tp2", "pp2", ...
    # In the shape's own blocks; None where it cannot be built. Of one member's lane; of a pipeline, where each request
    # holds its blocks at every member, the blocks that a group of such members has.
    capacity: KvCapacity | None
    why_not: str = ""  # why it cannot be built; one sentence for people
    step_cost: StepCost | None = None  # as profiled; None: it was not, and what is measured counts alone
    step_tokens: int = STEP_TOKENS  # new tokens of a full step, `max_num_batched_tokens`


# What an instance can run, and where, stays as it is, and a thousand are alike: what comes off a wire becomes the
# object that is here already. That is faster than to make another one, and comparing two answers costs next to nothing.


@lru_cache(maxsize=4096)
def _capacity(*values: int) -> KvCapacity:
    return KvCapacity(**dict(zip(KvCapacity.__slots__, values, strict=True)))


@lru_cache(maxsize=4096)
def _device(node_id: str, node_ip: str, device: str, pid: int, domain: str) -> DeviceInfo:
    return DeviceInfo(node_id=node_id, node_ip=node_ip, device=device, pid=pid, domain=domain)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSnapshot:
    """All that is known of one instance."""

    key: InstanceKey
    state: InstanceState
    endpoint: str = ""  # "host:port" of its request channel, empty until it is ready
    device: DeviceInfo = field(default_factory=DeviceInfo)
    capacity: KvCapacity | None = None  # None until it is ready
    stats: InstanceStats = field(default_factory=InstanceStats)
    lanes: tuple[LaneInfo, ...] = ()  # shapes it was asked to be able to run; empty until it is ready
    lane: str = "dp"  # the one it runs: "dp", or a group like "tp2@(0,1)"
    epoch: Epoch = field(default=Epoch(0))  # of the last switch it committed
    peer_endpoint: str = ""  # "host:port" for its peers, empty until it is ready
    groups_ready: tuple[str, ...] = ()  # names of `GroupSpec`s whose communicators are ready here
    groups_failed: tuple[str, ...] = ()  # ... and of those that failed and need a new round
    rss_bytes: int = 0
    phase: str = ""  # what a STARTING one does, in a few words for people
    failure: str = ""  # why it is DEAD, or why the slot's life before it ended; one sentence for people
    # Of one life, answers of one revision differ in their loads and their term alone. 0: the instance gave no number.
    revision: int = 0
    term: int = 0  # of the newest controller that has called it; 0: none has
    placements: tuple[PlacementNote, ...] = ()  # the newest changes of where KV is, by searches

    @property
    def instance_id(self) -> InstanceId:
        """The slot this instance fills."""
        return self.key.instance_id

    def __reduce__(self) -> tuple[Any, ...]:
        loads, key = _loads_of(self), self.key
        return _snapshot, (*loads, key.instance_id, key.incarnation, _written(self.lanes), *_rest_of(self))


_LOADS = ("stats", "rss_bytes", "revision", "term")
_FACE = tuple(f.name for f in fields(InstanceSnapshot) if f.name not in ("key", *_LOADS))
_REST = tuple(name for name in _FACE if name != "lanes")
_loads_of, _rest_of = attrgetter(*_LOADS), attrgetter(*_REST)
face_of = attrgetter(*_FACE)
"""All that an answer of one life says but its loads and its term, as a tuple."""


@lru_cache(maxsize=64)
def _written(lanes: tuple[LaneInfo, ...]) -> str:
    """The lanes of one instance or of a thousand: what is as long as this travels as one string, which is the key to
    the objects that were made of it.
    """
    return json.dumps(to_data(lanes), separators=(",", ":"))


@lru_cache(maxsize=4096)
def _lanes(written: str) -> tuple[LaneInfo, ...]:
    return tuple(from_data(LaneInfo, lane) for lane in json.loads(written))


@lru_cache(maxsize=4096)
def _said(instance_id: InstanceId, incarnation: int, lanes: str, *rest: Any) -> dict[str, Any]:
    key = InstanceKey(instance_id=instance_id, incarnation=incarnation)
    return dict(zip(_REST, rest, strict=True), key=key, lanes=_lanes(lanes))


def _snapshot(stats: InstanceStats, rss_bytes: int, revision: int, term: int, *said: Any) -> InstanceSnapshot:
    """What came off a wire. An instance says nearly always what it said the last time, but for its loads: that is the
    objects which are here already.
    """
    return InstanceSnapshot(**_said(*said), stats=stats, rss_bytes=rss_bytes, revision=revision, term=term)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one ingress wants and has not got, or has got by a wish. Planners add them up over all ingresses."""

    num_running: int = 0
    num_waiting: int = 0  # requests without an instance
    longest_waiting_tokens: int = 0  # prompt and output of the longest request that no route can hold; else 0
    wanted_degrees: tuple[tuple[int, int], ...] = ()  # (degree, requests in flight that asked for it); 1 is dp
    num_priority: int = 0  # requests in flight above normal priority


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPolicy:
    """Who decides about the layout."""

    is_auto: bool = True  # the merge planner; else `target` stands until it is asked otherwise
    target: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRecord:
    """How far a switch is, for people."""

    plan_id: str
    what: str  # "merge tp2@(0,1) (carry)"
    phase: str  # "prepare", "commit", "done", "aborted"
    why: str
    started_s: float  # seconds since the Unix epoch
    seconds: float = 0.0
    report: SwitchReport | None = None  # the phases; once it is done
    failure: str = ""  # why it was aborted


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """The whole application at one moment."""

    app: str
    time_s: float  # seconds since the Unix epoch
    layout: Layout
    instances: tuple[InstanceSnapshot, ...]  # by instance id
    routing_version: Version = NO_VERSION
    controller_started_s: float = 0.0
    ranks: tuple[InstanceId, ...] = ()  # slots by node and device; a topology-valid group is a run of these
    groups: tuple[Group, ...] = ()  # of all kinds whose members are all READY with lanes and communicators
    demands: tuple[Demand, ...] = ()  # of the ingresses heard of lately
    policy: LayoutPolicy = LayoutPolicy()
    layout_since_s: float = 0.0  # seconds since the Unix epoch; when the layout last changed
    last_switch: SwitchRecord | None = None  # that has begun, gone on or ended most recently
    switching: tuple[SwitchPlan, ...] = ()  # under way; no two have a member in common
    resting: tuple[SwitchPlan, ...] = ()  # that were aborted a moment ago: their members wait for the next try
    leaving: tuple[InstanceId, ...] = ()  # are being drained, and serve on until their groups have ended

    @property
    def epoch(self) -> Epoch:
        """Version of the layout."""
        return self.layout.epoch

    @property
    def busy(self) -> frozenset[InstanceId]:
        """Members of the switches under way, and of those that rest: no other switch may have them now."""
        return frozenset(self.claims)

    @property
    def claims(self) -> dict[InstanceId, Group]:
        """The group of each of these switches, by member."""
        return {member: plan.group for plan in (*self.resting, *self.switching) for member in plan.group.members}

    def instance(self, instance_id: InstanceId) -> InstanceSnapshot | None:
        """The instance that fills the slot now, or None."""
        return next((i for i in self.instances if i.instance_id == instance_id), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutView:
    """What a snapshot says of the cluster's shape, for people and the SDK."""

    time_s: float  # seconds since the Unix epoch
    layout: Layout
    layout_since_s: float  # seconds since the Unix epoch
    policy: LayoutPolicy
    formable: tuple[Group, ...]  # tp and pp groups that could run now, those that do included
    cannot: tuple[LaneInfo, ...]  # shapes that an instance was asked to be able to run and is not, each once
    last_switch: SwitchRecord | None = None

    @classmethod
    def of(cls, snapshot: ClusterSnapshot) -> "LayoutView":
        """The view of `snapshot`."""
        lanes = {lane.shape: lane for i in snapshot.instances for lane in i.lanes if lane.capacity is None}
        return cls(
            time_s=snapshot.time_s,
            layout=snapshot.layout,
            layout_since_s=snapshot.layout_since_s,
            policy=snapshot.policy,
            formable=snapshot.groups,
            cannot=tuple(lanes[shape] for shape in sorted(lanes)),
            last_switch=snapshot.last_switch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One place that requests can be sent to: the leader of a group."""

    key: InstanceKey
    endpoint: str  # "host:port"
    members: tuple[InstanceId, ...]
    shape: str  # "dp", "tp2", "pp2", ...
    max_model_len: int = 0  # tokens a request may have here; 0: as the link says


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where an instance listens for ingresses, whether or not requests are sent to it now."""

    key: InstanceKey
    endpoint: str  # "host:port"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """Where requests may go. `version` grows with every change; an ingress never goes back to an older one."""

    version: Version
    epoch: Epoch
    routes: tuple[Route, ...]
    is_draining: bool = False  # the application ends: no ingress takes new requests
    addresses: tuple[Address, ...] = ()  # all READY instances: an ingress keeps a link to each, for switches
    max_model_len: int = 0  # of the widest shape that this cluster can form; 0: unknown
