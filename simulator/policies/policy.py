"""What a policy says about a cluster before it serves: which shapes there are, who decides, what runs beside."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from pengserve.planners.groups import groups_for
from pengserve.planners.long_answers import GivingWay
from pengserve.planners.types.config import DropConfig, JudgeConfig, MergeConfig
from pengserve.planners.types.errors import ConfigError
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.simulator.dispatcher import Dispatch
from pengserve.simulator.engine.cluster import SimCluster
from pengserve.simulator.engine.offload.planner import OffloadPlanner
from pengserve.simulator.engine.swapping.costs import SwapOptions

Companion = Callable[[SimCluster], Coroutine[Any, Any, None]]
"""Something that runs beside the controller while requests are served, until it is cancelled."""

REST = MergeConfig(is_auto=False)

HostUse = Literal["unused", "tiers", "prefixes", "offload", "swap"]
"""Nothing, production's host tier, vLLM's own offloading of prefixes, offloading by layers in decode, or swapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The cluster that a policy is for."""

    num_instances: int
    per_node: int
    degrees: tuple[int, ...]  # tensor-parallel degrees that the configuration allows
    max_stages: int  # of pipelines, likewise
    has_host: bool = False  # instances have memory of their hosts for KV


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a policy wants the cluster to be."""

    degrees: tuple[int, ...] = ()  # of lanes to build
    max_stages: int = 1
    merge: MergeConfig = REST
    drop: DropConfig = field(default_factory=lambda: DropConfig(is_auto=False))
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    layout: tuple[Group, ...] = ()  # that is formed before the first request comes, and kept; empty: nothing is pinned
    is_static: bool = False  # members of tp groups hold their share of the weights alone
    preemption: Literal["recompute", "swap"] = "recompute"
    dispatch: Dispatch = "load"
    host: HostUse = "unused"  # what `cluster.host_bytes` is for
    offload: Callable[[], OffloadPlanner] | None = None  # of each instance, where `host` is "offload"
    swap: SwapOptions | None = None  # where `host` is "swap"
    redirects: bool = False  # what waits where there is no room goes on to where it can begin
    short_prompts: bool = False  # overtake long ones
    late_prompts: bool = False  # yield to those that can be in time
    long_answers: GivingWay | None = None  # give way to prompts that wait for memory
    short_first_steps: bool = False  # of long prompts, of instances alone that were idle
    companion: Companion | None = None


class Policy(BaseModel, ABC):
    """Options of one policy; each kind is a small file of this folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @abstractmethod
    def setup(self, facts: Facts) -> Setup:
        """What it wants.

        Raises:
            ConfigError: this cluster cannot be so.
        """


def groups_of(facts: Facts, kind: GroupKind, degree: int, field_name: str) -> tuple[Group, ...]:
    """All instances in groups of `degree`.

    Raises:
        ConfigError: they cannot be grouped so; names the field.
    """
    count, room = facts.num_instances, facts.per_node if kind is GroupKind.TP else facts.num_instances
    if degree > count:
        raise ConfigError(f"{field_name} is {degree}, and cluster.instances only {count}: take more instances or less")
    if count % degree or (kind is GroupKind.TP and room % degree and count > room):
        raise ConfigError(
            f"{field_name} is {degree}: {count} instances, {min(room, count)} a node, cannot all be in such groups;"
            " take a number that divides both"
        )
    ranks = [InstanceId(i) for i in range(count)]
    nodes = {i: str(i // room) for i in ranks}
    return groups_for(ranks, nodes, [degree], kind)


Config = TypeVar("Config", MergeConfig, DropConfig, JudgeConfig)

_NAMES: dict[type, str] = {bool: "true or false", int: "a number", float: "a number", str: "a word"}


def planner_config(kind: type[Config], given: dict[str, Any], where: str, **fixed: Any) -> Config:
    """The planners' config with the fields that are `given`.

    Raises:
        ConfigError: there is no such field, or its value is not what it may be; names it.
    """
    known = {f.name: type(getattr(kind(), f.name)) for f in fields(kind) if f.name not in fixed}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{where}.{name} is no known field: choose among {', '.join(known)}")
        if _NAMES.get(type(value)) != _NAMES[known[name]]:
            raise ConfigError(f"{where}.{name} must be {_NAMES[known[name]]}, not {value!r}")
    try:
        return kind(**{**given, **fixed})
    except ValueError as error:
        raise ConfigError(f"{where}.{error}") from None
