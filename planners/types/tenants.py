"""What tenants may have: weights of their shares, and limits of what they have in flight and use."""

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_TENANTS = 10_000  # whose usage an ingress or the controller remembers


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """One tenant. None: no limit. Of limits, one ingress's part: the cluster's by the number of ingresses."""

    weight: float = 1.0  # of its share
    max_requests: int | None = None  # sequences in flight
    max_tokens: int | None = None  # of prompts and answers in flight
    tokens_per_minute: int | None = None  # that were computed: prompts without cached tokens, and answers


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessConfig:
    """How the cluster's time is shared among tenants."""

    is_on: bool = False  # requests begin by shares; else in the order in which they come
    age_s: float = 10.0  # once in so long, the request of a class that has waited longest goes first
    max_tenants: int = MAX_TENANTS
    default: TenantConfig = field(default_factory=TenantConfig)  # of tenants that are not named
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)

    def tenant(self, name: str) -> TenantConfig:
        """What holds for a tenant."""
        return self.tenants.get(name, self.default)

    @property
    def has_limits(self) -> bool:
        """Whether a tenant can be refused anything."""
        return any(
            value is not None
            for tenant in (self.default, *self.tenants.values())
            for value in (tenant.max_requests, tenant.max_tokens, tenant.tokens_per_minute)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """What an ingress has charged tenants since its last report."""

    charges: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # (virtual seconds, counter before them)
    tenants: tuple[str, ...] = ()  # that are active there: it asks for their counters
    least_active: float | None = None  # of their counters; None: none is active


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedUsage:
    """What all ingresses together have charged."""

    counters: Mapping[str, float] = field(default_factory=dict)
    least_active: float | None = None  # of tenants that are active at other ingresses


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUse:
    """What one tenant's requests of one class have at an ingress, for people."""

    tenant: str  # "": requests without one; "*": all beyond those that are shown
    service_class: str
    num_waiting: int = 0  # for their first token
    num_running: int = 0
    share: float = 0.0  # of the tokens that were served lately, computed prompts and answers
    total_tokens: int = 0  # of them, ever
    total_ended: int = 0
    total_parked: int = 0  # times that requests which ended had been parked with their KV,
    total_recomputed: int = 0  # ... or had lost it, so that all of it was computed again
    swapped_bytes: int = 0  # of their KV, copied between device and host for parks
    attainment: float | None = None  # share of the requests with an SLO that kept it; None: none had one
