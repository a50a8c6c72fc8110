"""Validated configuration as frozen values. `cluster/settings.py` builds these from YAML and the environment."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pengserve.planners.types.contract import ServiceClass


def check_degrees(degrees: Iterable[Any], also: str = "") -> tuple[int, ...]:
    """Degrees of tensor-parallel groups, in order and each once.

    Args:
        also: what else may be given, for people, such as "auto".

    Raises:
        ValueError: one is no power of two, or below 2.
    """
    found = tuple(degrees)
    if not all(type(degree) is int and degree >= 2 and not degree & (degree - 1) for degree in found):
        raise ValueError(
            f"give powers of two such as [2, 4],{also and f' or {also},'} or [] for none; got {list(found)}"
        )
    return tuple(sorted(set(found)))


def check_max_stages(max_stages: int) -> int:
    """The most stages of a pipeline. Raises ValueError where it is no power of two."""
    if max_stages < 1 or max_stages & (max_stages - 1):
        raise ValueError(f"give a power of two such as 2 or 4, or 1 for none; got {max_stages}")
    return max_stages


class MicrobatchPolicy(StrEnum):
    """How the work of a pipeline becomes microbatches."""

    LOOKAHEAD = "lookahead"  # of equal cost, over all that is queued (KunServe section 4.3)
    TOKENS = "tokens"  # all that is ready, up to the budget of tokens: vLLM's way, for comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConfig:
    """What one instance needs to start."""

    app: str
    model: str  # a local Hugging Face directory, or a hub name where a hub can be reached
    device: str = "cpu"  # "cpu" | "cuda"
    cpu_threads: int = 1  # OpenMP threads of an instance on CPU
    engine: Mapping[str, Any] = field(default_factory=dict)  # vLLM engine arguments, by their Python names
    channel_token: str = ""  # shared secret of request and peer channels
    fingerprint: str = ""  # of model, configuration and versions; processes of two fingerprints never talk
    versions: str = ""  # of PengServe and vLLM, that the instance's node must have; empty: any
    channel_host: str = ""  # address to bind; empty: the node's own
    degrees: tuple[int, ...] = ()  # tensor-parallel degrees to build lanes for; empty: dp alone, and stock weights
    max_stages: int = 1  # of pipelines to build lanes for; 1: parameters are never dropped
    microbatches: MicrobatchPolicy = MicrobatchPolicy.LOOKAHEAD  # what fills the stages of a pipeline
    max_in_flight: int = 0  # microbatches of a pipeline; 0: one a stage, fewer where instances share processors
    # For weights and KV together. 0: weights as they are, and KV as the engine's flags say; -1: what is free.
    memory_bytes: int = 0
    chunk_bytes: int = 2 << 20  # unit in which the arena moves memory between weights and KV
    host_bytes: int = 0  # of the host tier of KV; 0: none, -1: a share of the node's free memory
    link_bytes_per_s: float = 0.0  # between device and host, emulated: copies take at least as long; 0: as they are
    host_file: str = ""  # a file that holds the host tier instead of memory
    places_by_slo: bool = False  # KV is placed by SLOs (LayerKV, OrbitFlow); needs a host tier
    session_pin_s: float = 0.0  # for so long after an answer, the KV of its session is kept where there is room
    peer_timeout_s: float = 5.0  # a collective or a peer's answer; then the group counts as broken
    communicator: str = ""  # of groups: "direct" or "nccl"; empty: what fits the device
    lease_s: float = 30.0  # without a word from a controller for so long, the instance asks whether its app is gone
    drain_timeout_s: float = 60.0

    @property
    def changes_shape(self) -> bool:
        """Whether the instance can be in a group with others."""
        return bool(self.degrees) or self.max_stages > 1

    @property
    def is_stock(self) -> bool:
        """Whether vLLM's engine runs as vLLM has it: in one shape, and with memory of its own."""
        return not (self.changes_shape or self.memory_bytes or self.host_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeConfig:
    """When to merge and split (Flying Serving section 2.3). Loads are shares of capacity in `[0, 1]`."""

    is_auto: bool = True  # the planner decides from the start; people can pin and release the layout at any time
    min_dwell_s: float = 5.0  # between turns of the layout for load, unless requests queue; and after the last wish
    merge_below: float = 0.25  # virtual KV load, and requests per slot, below which tp pays
    split_above: float = 0.5  # ... above which throughput counts; must be above `merge_below`
    busy_requests: int = 8  # requests per instance that are load 1, where there are more slots than that
    quiet_s: float = 2.0  # load must have been low for so long before a merge
    max_degree: int = 8
    load_strategy: str = "carry"  # strategies of `SwitchStrategy`, per reason
    priority_strategy: str = "hard"
    long_context_strategy: str = "carry"

    def __post_init__(self) -> None:
        if self.split_above <= self.merge_below:
            raise ValueError(
                f"split_above ({self.split_above:g}) must be above merge_below ({self.merge_below:g}),"
                " or the shape would change to and fro"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DropConfig:
    """When to drop replicated parameters and when to restore them (KunServe sections 4.1 and 4.4).

    Loads are memory demand as a share of KV capacity; demand may exceed 1.
    """

    is_auto: bool = True  # False: nothing is dropped by itself; what was dropped by hand comes back all the same
    max_stages: int = 1  # of a pipeline; 1: parameters are never dropped
    drop_above: float = 0.95  # demand of a group, as a share of what it holds now, above which memory is short
    target: float = 0.8  # share that the demand should be of what there is after a drop
    restore_below: float = 0.5  # demand as a share of what the members hold alone, below which parameters come back
    horizon_s: float = 1.0  # demand is predicted for so long ahead
    quiet_s: float = 1.0  # demand must have been below `restore_below` for so long
    min_dwell_s: float = 2.0  # between a drop and the restore that undoes it
    link_bytes_per_s: float = 1e9  # from instance to instance; for prices alone, which people see

    def __post_init__(self) -> None:
        check_max_stages(self.max_stages)
        if self.target > self.drop_above:
            raise ValueError(
                f"target ({self.target:g}) must not be above drop_above ({self.drop_above:g}),"
                " or memory would be short right after a drop"
            )
        if self.restore_below >= self.drop_above:
            raise ValueError(
                f"restore_below ({self.restore_below:g}) must be below drop_above ({self.drop_above:g}),"
                " or parameters would come and go"
            )


MOST_HORIZONS = 5.0  # times `JudgeConfig.horizon_s`, beyond which nothing is predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig:
    """When a change of the layout pays (`planners.judge`). The unit is request-seconds."""

    is_on: bool = True  # False: changes come by thresholds, in the order of `planners.selector`
    horizon_s: float = 20.0  # what is predicted; longer where requests live longer
    margin: float = 0.15  # of what is predicted without the change, that it must save beyond its price
    least_s: float = 1.0  # ... and at least so many request-seconds
    slo_scale: float = 5.0  # limits of TTFT and TPOT, times what a request alone would have on an instance alone
    miss_weight: float = 20.0  # a request beyond a limit costs so many times the seconds of a request alone
    regret: float = 0.5  # weight of what would be lost if fewer or more requests come than expected

    def __post_init__(self) -> None:
        if self.horizon_s <= 0:
            raise ValueError(f"horizon_s ({self.horizon_s:g}) must be above 0, as nothing could pay within no time")
        for name in ("margin", "least_s", "slo_scale", "miss_weight", "regret"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} ({getattr(self, name):g}) must not be below 0")

    def horizon(self, life_s: float) -> float:
        """Seconds to predict where a request takes `life_s`: memory is as full as it will be no sooner."""
        return max(self.horizon_s, min(life_s, MOST_HORIZONS * self.horizon_s))

    def least(self, kept_s: float) -> float:
        """Request-seconds that a change must save where `kept_s` are predicted without it."""
        return max(self.least_s, self.margin * kept_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateConfig:
    """When requests move from full instances to free ones. Loads are shares of KV, and may exceed 1."""

    redirects: bool = True  # what waits without KV where there is no room is sent on to where it can begin
    is_auto: bool = False  # running requests move with their KV
    interval_s: float = 1.0  # between two looks
    full_above: float = 0.85  # load above which requests leave an instance
    free_below: float = 0.6  # ... and below which an instance takes them; not above `full_above`

    def __post_init__(self) -> None:
        if self.free_below > self.full_above:
            raise ValueError(
                f"free_below ({self.free_below:g}) must not be above full_above ({self.full_above:g}),"
                " or an instance would be both"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """What the controller needs to run."""

    app: str
    num_instances: int
    tick_s: float = 0.5  # period of observe -> plan -> act
    status_timeout_s: float = 3.0  # one status call to an instance
    lost_after_s: float = 10.0  # an instance that answers no status for so long is killed and replaced
    start_timeout_s: float = 600.0  # loading a model
    restart_backoff_s: float = 1.0  # doubles with each failure in a row, up to `restart_backoff_max_s`
    restart_backoff_max_s: float = 60.0
    drain_timeout_s: float = 60.0
    max_starting: int = 0  # instances that load at the same time; 0: all
    cpus_per_instance: float = 1.0
    gpus_per_instance: float = 0.0
    degrees: tuple[int, ...] = ()  # tensor-parallel degrees that groups may have; empty: dp alone
    merge: MergeConfig = field(default_factory=MergeConfig)
    drop: DropConfig = field(default_factory=DropConfig)
    migrate: MigrateConfig = field(default_factory=MigrateConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    classes: tuple[ServiceClass, ...] = ()  # beside the built-in ones, or in their place
    prepare_timeout_s: float = 3.0
    commit_timeout_s: float = 20.0  # beyond a plan's own drain_timeout_s
    event_log_path: str = ""  # JSONL; empty keeps events in memory alone
    event_log_max_bytes: int = 64 << 20  # of each file; 0: no limit
    event_log_num_older: int = 4  # files that are kept besides the newest

    @property
    def is_elastic(self) -> bool:
        """Whether instances can ever form groups."""
        return bool(self.degrees) or self.drop.max_stages > 1
