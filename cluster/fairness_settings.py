"""The section `fairness` of the settings: how the cluster's time is shared among tenants, and what each may have.

    fairness:
      enabled: true
      default: {max_requests: 200}
      tenants:
        acme: {weight: 3, tokens_per_minute: 100000}

A tenant is named by `x-pengserve-tenant` where `security.trust_tenant_header` is set, else by its API key's id.
Standard library and pydantic only, as `settings.py`.
"""

import re
from typing import Annotated

from pydantic import BaseModel, Field, field_validator

from pengserve.planners.types.tenants import MAX_TENANTS, FairnessConfig, TenantConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}")  # as of the header
_Limit = Annotated[int | None, Field(ge=1, le=1 << 53)]


class TenantSettings(BaseModel, extra="forbid", validate_default=True, frozen=True):
    """What one tenant may have. Limits are of the whole cluster; each ingress grants its part of them."""

    weight: float = Field(default=1, gt=0, le=1000)  # of its share
    max_requests: _Limit = None  # sequences in flight
    max_tokens: _Limit = None  # of prompts and answers in flight
    tokens_per_minute: _Limit = None  # computed: prompts without what was cached, and answers

    def config(self, num_ingresses: int) -> TenantConfig:
        """One ingress's part."""
        return TenantConfig(
            weight=self.weight,
            max_requests=_part(self.max_requests, num_ingresses),
            max_tokens=_part(self.max_tokens, num_ingresses),
            tokens_per_minute=_part(self.tokens_per_minute, num_ingresses),
        )


class FairnessSettings(BaseModel, extra="forbid", validate_default=True, frozen=True):
    """Shares and limits of tenants."""

    enabled: bool = False  # requests begin by their tenants' shares; limits hold without it too
    age_s: float = Field(default=10, gt=0, le=3600)  # once in so long, a class's oldest request goes first
    default: TenantSettings = TenantSettings()  # of tenants that are not named
    tenants: dict[str, TenantSettings] = {}

    @field_validator("tenants")
    @classmethod
    def _names(cls, value: dict[str, TenantSettings]) -> dict[str, TenantSettings]:
        if len(value) > MAX_TENANTS:
            raise ValueError(f"at most {MAX_TENANTS:,} tenants can be named, got {len(value):,}")
        for name in value:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{name[:40]!r} is no name of a tenant: give 1 to 128 letters, digits and ._:@/-, a letter or"
                    " digit first"
                )
        return value

    def config(self, num_ingresses: int) -> FairnessConfig:
        """For one of so many ingresses."""
        return FairnessConfig(
            is_on=self.enabled,
            age_s=self.age_s,
            default=self.default.config(num_ingresses),
            tenants={name: tenant.config(num_ingresses) for name, tenant in self.tenants.items()},
        )


def _part(limit: int | None, num_ingresses: int) -> int | None:
    return None if limit is None else -(-limit // num_ingresses)
