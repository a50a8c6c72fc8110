"""What each tenant may have in flight, and use in a minute. Pure: times are what the caller says.

Tokens per minute are a leaking bucket of what was really computed: it fills when an answer ends, by its prompt without
cached tokens and its own, and leaks by the limit in a minute. A tenant whose bucket holds a minute's tokens or more is
refused until it has leaked enough. So is one that has as many sequences in flight as it may, or as many tokens. The
request that comes to a limit of tokens is still let in, since its tokens are not known before it is read.

Memory is bounded: a tenant is forgotten when it has nothing in flight and its bucket is empty. Beyond `max_tenants`
those that were active longest ago, and have nothing in flight, are forgotten with what their buckets hold.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from pengserve.planners.types.tenants import FairnessConfig

MAX_RETRY_S = 60
IN_FLIGHT_RETRY_S = 1


class TenantRefusal(StrEnum):
    """Which limit a tenant has come to."""

    REQUESTS = "tenant-requests"
    TOKENS = "tenant-tokens"
    RATE = "tenant-tokens-per-minute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why a tenant is refused, and when to try again."""

    refusal: TenantRefusal
    limit: int
    retry_after_s: int


@dataclass(slots=True)
class _Use:
    num_sequences: int = 0
    num_tokens: int = 0
    bucket: float = 0.0
    bucket_s: float = 0.0  # when it was that full

    def level(self, per_minute: int, now_s: float) -> float:
        """Tokens in the bucket now."""
        return max(0.0, self.bucket - per_minute / 60 * max(0.0, now_s - self.bucket_s))


class TenantLimits:
    """Counts what tenants have and use at one ingress."""

    def __init__(self, config: FairnessConfig) -> None:
        self._config = config
        self._uses: dict[str, _Use] = {}  # the least recently active first

    def __len__(self) -> int:
        return len(self._uses)

    def why_not(self, tenant: str, num_sequences: int, now_s: float) -> Refused | None:
        """Why so many sequences of a tenant are not taken now; None where they are."""
        limits, use = self._config.tenant(tenant), self._uses.get(tenant) or _Use()
        if limits.max_requests is not None and use.num_sequences + num_sequences > limits.max_requests:
            return Refused(refusal=TenantRefusal.REQUESTS, limit=limits.max_requests, retry_after_s=IN_FLIGHT_RETRY_S)
        if limits.max_tokens is not None and use.num_tokens >= limits.max_tokens:
            return Refused(refusal=TenantRefusal.TOKENS, limit=limits.max_tokens, retry_after_s=IN_FLIGHT_RETRY_S)
        if limits.tokens_per_minute is not None:
            beyond = use.level(limits.tokens_per_minute, now_s) - limits.tokens_per_minute
            if beyond >= 0:
                wait_s = math.floor(beyond / limits.tokens_per_minute * 60) + 1
                return Refused(
                    refusal=TenantRefusal.RATE,
                    limit=limits.tokens_per_minute,
                    retry_after_s=min(MAX_RETRY_S, wait_s),
                )
        return None

    def take(self, tenant: str, num_sequences: int) -> None:
        """So many sequences are in flight; `give_back` ends that."""
        self._use(tenant).num_sequences += num_sequences

    def give_back(self, tenant: str, num_sequences: int, now_s: float) -> None:
        """So many sequences are answered."""
        self._uses[tenant].num_sequences -= num_sequences
        self._forget_if_idle(tenant, now_s)

    def hold(self, tenant: str, num_tokens: int) -> None:
        """A sequence may come to so many tokens; `use` ends that."""
        self._use(tenant).num_tokens += num_tokens

    def use(self, tenant: str, held_tokens: int, used_tokens: int, now_s: float) -> None:
        """A sequence that held so many tokens is over, of which so many were computed."""
        use, limits = self._uses[tenant], self._config.tenant(tenant)
        use.num_tokens -= held_tokens
        if limits.tokens_per_minute is not None:
            use.bucket = use.level(limits.tokens_per_minute, now_s) + used_tokens
            use.bucket_s = now_s
        self._forget_if_idle(tenant, now_s)

    def in_flight(self, tenant: str) -> tuple[int, int]:
        """Sequences and tokens of a tenant."""
        use = self._uses.get(tenant) or _Use()
        return use.num_sequences, use.num_tokens

    def _use(self, tenant: str) -> _Use:
        use = self._uses.pop(tenant, None) or _Use()
        self._uses[tenant] = use
        if len(self._uses) > self._config.max_tenants:
            idle = next((name for name, each in self._uses.items() if not _is_busy(each) and name != tenant), None)
            if idle is not None:
                del self._uses[idle]
        return use

    def _forget_if_idle(self, tenant: str, now_s: float) -> None:
        use, limits = self._uses[tenant], self._config.tenant(tenant)
        per_minute = limits.tokens_per_minute
        if not _is_busy(use) and (per_minute is None or use.level(per_minute, now_s) <= 0):
            del self._uses[tenant]


def _is_busy(use: _Use) -> bool:
    return bool(use.num_sequences or use.num_tokens)


def limits_of(config: FairnessConfig) -> TenantLimits | None:
    """None where no tenant has a limit: then nothing is counted."""
    return TenantLimits(config) if config.has_limits else None
