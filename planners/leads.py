"""How far each tenant is ahead of its share of what is served. Pure: times are what the caller says.

A fluid that served all tenants at once, by their weights, would have served each of them `fair` virtual seconds:

    fair   +=  weight of who was charged / weights of all that are present  *  virtual seconds charged
    lead    =  virtual seconds that a tenant was charged  -  fair, within bounds

A tenant that asks for less than its share falls behind, one that floods comes ahead. One that is ahead by more than it
would be served in `AHEAD_S` is told apart: its requests come after equally urgent ones of tenants that are not. So a
tenant within its share is served as if the flood were not there, and two tenants that both ask for more than their
shares are both ahead, and served alike.

Only what is served while requests wait for a place counts: as long as there is room for all, no tenant takes anything
from another, and leads fade. Who was served most is known all the same (`used`): where places have just run out, it
tells a flood from its guests before leads do. The lead is bounded, as what was long ago is neither debt nor credit: to
what a tenant would be served in `DEBT_S`, and behind to `CREDIT_S`. A tenant that is alone has no share to be ahead of.
"""

import math
from dataclasses import dataclass

AHEAD_S = 1.0
LEVEL_S = 0.5  # a tenant that was ahead is no more, once its lead is below this
DEBT_S = 4.0
CREDIT_S = 40.0
PRESENT_S = 10.0  # since a tenant last asked for anything, or was served
FADE_S = 5.0  # in which a lead fades to 1/e, while there is room for all
RATE_S = 10.0  # in which the rate of service is looked at, of all and of each


@dataclass(slots=True)
class _Tenant:
    weight: float
    lead: float  # virtual seconds
    fair: float  # the value of `Leads._fair` as of which `lead` is
    seen_s: float
    looked_s: float
    is_ahead: bool = False
    used: float = 0.0  # virtual seconds, decayed, as of `used_s`
    used_s: float = -math.inf

    def use(self, virtual_s: float, now_s: float) -> float:
        """With so many more; what it has been served lately."""
        self.used = max(0.0, self.used * math.exp(-max(0.0, now_s - self.used_s) / RATE_S) + virtual_s)
        self.used_s = max(self.used_s, now_s)
        return self.used


class Leads:
    """Of the tenants that are present."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}  # the one seen longest ago first
        self._weights = 0.0  # of all of them
        self._fair = 0.0
        self._lately, self._lately_s = 0.0, -math.inf  # what `_fair` has grown by, decayed
        self.is_short = True  # whether requests wait for a place

    def __len__(self) -> int:
        return len(self._tenants)

    def see(self, name: str, weight: float, now_s: float) -> bool:
        """A tenant asks for something; whether it was not present."""
        self._forget(now_s)
        tenant = self._tenants.pop(name, None)
        is_new = tenant is None
        if tenant is None:
            tenant = _Tenant(weight, 0.0, self._fair, now_s, now_s)
            self._weights += weight
        tenant.seen_s = now_s
        self._tenants[name] = tenant
        return is_new

    def charge(self, name: str, weight: float, virtual_s: float, now_s: float) -> None:
        """A tenant was served so many virtual seconds; fewer than 0: it was charged too much before."""
        self.see(name, weight, now_s)
        self._tenants[name].use(virtual_s, now_s)
        if not self.is_short:
            return
        fair = virtual_s * weight / self._weights
        self._fair += fair
        self._decay(now_s)
        self._lately = max(0.0, self._lately + fair)
        self._tenants[name].lead += virtual_s

    def is_ahead(self, name: str, grain_s: float, now_s: float) -> bool:
        """Whether a tenant is ahead of its share.

        Args:
            grain_s: virtual seconds that one of its requests is charged at once: less than that tells nothing.
        """
        tenant = self._tenants.get(name)
        if tenant is None:
            return False
        self._decay(now_s)
        rate, keep = self._lately / RATE_S, 1.0
        if not self.is_short:
            keep = math.exp(-max(0.0, now_s - tenant.looked_s) / FADE_S)
        lead = (tenant.lead + tenant.fair - self._fair) * keep
        tenant.lead = min(max(lead, -CREDIT_S * rate), DEBT_S * rate + 2 * grain_s)
        tenant.fair, tenant.looked_s = self._fair, now_s
        bound = max(LEVEL_S * rate, grain_s / 2) if tenant.is_ahead else max(AHEAD_S * rate, grain_s)
        tenant.is_ahead = len(self) > 1 and tenant.lead > bound
        return tenant.is_ahead

    def used(self, name: str, now_s: float) -> float:
        """Virtual seconds that a tenant was served lately, also while there was room for all."""
        tenant = self._tenants.get(name)
        return tenant.use(0.0, now_s) if tenant is not None else 0.0

    def put_ahead(self, name: str, grain_s: float, now_s: float) -> None:
        """A tenant that is present is ahead from now on, by as little as counts."""
        if not self.is_ahead(name, grain_s, now_s):
            tenant = self._tenants[name]
            tenant.lead, tenant.is_ahead = max(AHEAD_S * self._lately / RATE_S, grain_s), True

    def _decay(self, now_s: float) -> None:
        if self.is_short:  # else it stays what it was when it mattered
            self._lately *= math.exp(-max(0.0, now_s - self._lately_s) / RATE_S)
        self._lately_s = max(self._lately_s, now_s)

    def _forget(self, now_s: float) -> None:
        while self._tenants:
            name, tenant = next(iter(self._tenants.items()))
            if now_s - tenant.seen_s <= PRESENT_S:
                return
            del self._tenants[name]
            self._weights = self._weights - tenant.weight if self._tenants else 0.0
