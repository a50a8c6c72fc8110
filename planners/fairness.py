"""In which order waiting requests of several tenants begin: virtual token counters, bands and ageing.

Each tenant has a counter of what it was served, in the cost model's seconds divided by its weight (VTC, Sheng et al.,
OSDI 2024). A waiting request's tag is what the counter will be when its turn comes:

    tag  =  counter  +  the estimates of the tenant's requests that go before it / weight

Lower tags begin first, so that tenants that wait are served alike and a flood only queues behind itself. A request is
charged its estimate when it begins, and the difference to its real cost while it runs and when it ends. A tenant that
comes back is lifted to the least counter of those that are active, as it was before its newest request began: time in
which a tenant asks for nothing earns no credit, and it begins before what a flood has queued.

Requests are ordered by `(band, tag)`, the least first. The band is twice the request's priority, which its class
bounds, and one more where its tenant is ahead of its share (`planners/leads.py`): of equally urgent requests those of
tenants within their shares come first, also before those that run.

Two rules keep bands from starving others. Both lift a request above all bands, where the one begins first
that was lifted first:

    a class with a guaranteed share that was served less lately has its next requests lifted, one for each place
    once in `age_s`, the request of a class that has waited longest is lifted, if it has waited `age_s`; where its
    tenant is ahead, until it begins

Bound: a request before which k requests of its class came and wait begins at most `(k + 1) * age_s` after it came,
plus the time until the places that lifted requests wait for are free. The order does not depend on tenants there.

Memory is bounded: beyond `max_tenants` the tenant that asks for nothing and was active least recently is forgotten. It
begins anew at the least counter, as a new tenant does. Where all are active, new ones share one counter.
"""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pengserve.planners.leads import Leads
from pengserve.planners.types.contract import BUILT_IN_CLASSES, ServiceClass

MUCH = 1.5  # times as much as another was served lately
LIFTED = -(1 << 40)  # above every band: a priority has 31 bits
OVERFLOW = "*"  # the tenant whose counter all share that find no place; no tenant's name has a star


def told_band(priority: int, is_ahead: bool) -> int:
    """The band of a request, whose tenant may be ahead of its share."""
    return 2 * priority + is_ahead


@dataclass(frozen=True, slots=True, order=True)
class Order:
    """What waiting requests are compared by: the least begins first."""

    band: int
    tag: float  # virtual seconds; of a lifted request the time at which it was lifted


@dataclass(frozen=True, slots=True, kw_only=True)
class FairConfig:
    """How shares are measured out."""

    weights: Mapping[str, float] = field(default_factory=dict)  # of tenants; those that are not named have 1
    classes: Mapping[str, ServiceClass] = field(default_factory=lambda: dict(BUILT_IN_CLASSES))
    age_s: float = 10.0  # once in so long, the oldest request of a class goes first
    window_s: float = 30.0  # in which a guaranteed share is looked at: older service counts 1/e and less
    max_tenants: int = 10_000


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    weight: float
    counter: float = 0.0  # virtual seconds
    started_at: float = 0.0  # the counter before the newest request began
    waiting: list["_Request"] = field(default_factory=list)  # in their order
    running: dict[str, "_Request"] = field(default_factory=dict)
    is_ahead: bool = False  # of its share
    grain: float = 0.0  # virtual seconds that the newest request was charged when it began
    pending: float = 0.0  # virtual seconds of them
    is_stale: bool = False  # tags of waiting requests are to be made anew
    delta: float = 0.0  # virtual seconds that `take_usage` has not told yet
    is_told: bool = False
    is_merged: bool = False  # the counter has what other ingresses charged

    @property
    def num_open(self) -> int:
        """Waiting and running requests."""
        return len(self.waiting) + len(self.running)


@dataclass(slots=True, eq=False)
class _Class:
    spec: ServiceClass
    waiting: dict[str, "_Request"] = field(default_factory=dict)
    num_lifted: int = 0
    served_s: float = 0.0  # lately; as of `FairShares._decayed_s`
    aged_s: float = -math.inf  # when one was last lifted for its age


@dataclass(slots=True, eq=False)
class _Request:
    request_id: str
    tenant: _Tenant
    service_class: _Class
    priority: int
    number: int
    since_s: float
    estimate_s: float
    share: float  # virtual seconds of one of the cost model's
    reserved_s: float = 0.0  # that its tenant was charged
    charged_s: float = 0.0  # that it has cost
    is_waiting: bool = True
    is_lifted: bool = False
    order: Order = Order(0, 0.0)

    @property
    def place(self) -> tuple[int, int]:
        """Among its tenant's own."""
        return self.priority, self.number

    def told(self, tag: float) -> Order:
        """Its order where it is not lifted."""
        return Order(told_band(self.priority, self.tenant.is_ahead), tag)


class FairShares:
    """The counters of one ingress, and the order of its requests. Deterministic; times are what the caller says."""

    def __init__(self, config: FairConfig) -> None:
        self._config = config
        self._tenants: dict[str, _Tenant] = {}  # the least recently active first
        self._overflow = _Tenant(OVERFLOW, 1.0)
        self._open: dict[str, _Tenant] = {}  # those with requests
        self._served: dict[str, _Tenant] = {}  # those of which requests have begun
        self._lowered: set[str] = set()  # lifted requests that have begun since the last `tend`
        self._num_slots = 0  # requests that may run at once; 0: not known
        self._leads = Leads()
        self._classes = {name: _Class(spec) for name, spec in config.classes.items()}
        self._requests: dict[str, _Request] = {}
        self._number = 0
        self._floor = 0.0  # virtual time; never goes back
        self._remote_floor: float | None = None  # of tenants that are active at other ingresses
        self._active: list[tuple[float, str]] = []  # a heap of (started_at, tenant), outdated entries among them
        self._stale: dict[str, _Tenant] = {}
        self._decayed_s = 0.0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_tenants(self) -> int:
        """Tenants with a counter of their own."""
        return len(self._tenants)

    # What becomes of requests ---------------------------------------------------------------------------------------

    def add(
        self, request_id: str, tenant: str, service_class: str, priority: int, estimate_s: float, now_s: float
    ) -> dict[str, Order]:
        """A request waits; the orders that are new or have changed.

        Args:
            estimate_s: what it will probably cost, in the cost model's seconds; above 0.
        """
        owner = self._tenant(tenant)
        was_away = not owner.num_open
        if was_away:
            self._activate(owner)
        self._open[owner.name] = owner
        changed = self._see(owner, now_s)
        if was_away:  # what it was when it left says nothing of now
            owner.is_ahead = self._is_ahead(owner, self._most_used(now_s), now_s)
        found = self._classes.get(service_class) or self._classes["default"]
        share = 1.0 / (owner.weight * found.spec.weight)
        self._number += 1
        request = _Request(request_id, owner, found, priority, self._number, now_s, estimate_s, share)
        self._requests[request_id] = request
        found.waiting[request_id] = request
        is_last = not owner.waiting or owner.waiting[-1].place < request.place
        owner.waiting.append(request)
        changed |= self._tell_greatest(request, now_s)
        if is_last:
            request.order = request.told(owner.counter + owner.pending)
            owner.pending += estimate_s * share
            return {**changed, request_id: request.order}
        owner.waiting.sort(key=lambda each: each.place)
        return {**changed, **self._tag(owner), request_id: request.order}

    def begin(self, request_id: str, now_s: float) -> None:
        """A request has left the queue: its tenant is charged the estimate."""
        request = self._requests.get(request_id)
        if request is None or not request.is_waiting:
            return
        tenant = request.tenant
        if tenant.waiting[0] is not request:
            self._note_stale(tenant)
        self._leave_queue(request)
        tenant.running[request_id] = request
        self._served[tenant.name] = tenant
        tenant.started_at = tenant.counter
        request.reserved_s, tenant.grain = request.estimate_s, request.estimate_s * request.share
        self._charge(request, request.estimate_s, now_s)
        heapq.heappush(self._active, (tenant.started_at, tenant.name))
        if request.is_lifted and tenant.is_ahead:  # it has begun, which was due: a flood gets no place for good by it
            request.order = request.told(tenant.counter)
            self._lowered.add(request_id)

    def charge(self, request_id: str, cost_s: float, now_s: float) -> None:
        """A request has cost so many seconds more; beyond its estimate its tenant pays at once."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self.begin(request_id, now_s)
        request.charged_s += cost_s
        beyond = request.charged_s - request.reserved_s
        if beyond > 0:
            request.reserved_s += beyond
            self._charge(request, beyond, now_s)
            self._note_stale(request.tenant)

    def end(self, request_id: str, now_s: float) -> None:
        """A request is over: its tenant gets back what was charged beyond its cost."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        tenant = request.tenant
        self._lowered.discard(request_id)
        if request.is_waiting:
            self._leave_queue(request)
            self._note_stale(tenant)
        elif request.reserved_s > request.charged_s:
            self._charge(request, request.charged_s - request.reserved_s, now_s)
            self._note_stale(tenant)
        if tenant.running.pop(request_id, None) is not None and not tenant.running:
            del self._served[tenant.name]
        if not tenant.num_open:
            self._open.pop(tenant.name, None)
            self._stale.pop(tenant.name, None)
            tenant.is_stale = False
            if not self._requests:
                self._floor = max(self._floor, tenant.counter)

    def prioritize(self, request_id: str, priority: int) -> dict[str, Order]:
        """A request has another priority from now on; the orders that have changed."""
        request = self._requests.get(request_id)
        if request is None or request.priority == priority:
            return {}
        request.priority = priority
        tenant = request.tenant
        if not request.is_waiting:
            request.order = request.told(request.order.tag)
            return {request_id: request.order}
        tenant.waiting.sort(key=lambda each: each.place)
        return self._tag(tenant)

    def order(self, request_id: str) -> Order | None:
        """The order of a request; None where it is unknown."""
        request = self._requests.get(request_id)
        return request.order if request is not None else None

    def tend(self, now_s: float, num_places: int = 1, *, is_short: bool = True, num_slots: int = 0) -> dict[str, Order]:
        """Lifts what is due and renews tags; the orders that have changed.

        Args:
            num_places: requests of a class that may be lifted for its share at a time: one for each instance.
            is_short: whether requests wait for a place: else none takes anything from another.
            num_slots: requests that all instances together step at once; 0: not known.
        """
        self._num_slots = num_slots
        self._leads.is_short = is_short
        changed = self._look(now_s) | {request_id: self._requests[request_id].order for request_id in self._lowered}
        self._lowered.clear()
        for tenant in self._stale.values():
            changed |= self._tag(tenant)
            tenant.is_stale = False
        self._stale.clear()
        waiting = [found for found in self._classes.values() if found.waiting]
        if not waiting:
            return changed
        self._decay(now_s)
        total_s = sum(found.served_s for found in self._classes.values())
        for found in waiting:
            is_short = len(waiting) > 1 and found.served_s < found.spec.guaranteed_share * total_s
            while is_short and found.num_lifted < min(num_places, len(found.waiting)):
                changed |= self._lift(min(_unlifted(found), key=lambda each: each.order), now_s)
            oldest = min(_unlifted(found), key=lambda each: (each.since_s, each.number), default=None)
            if oldest is not None and now_s - max(oldest.since_s, found.aged_s) >= self._config.age_s:
                found.aged_s = now_s
                changed |= self._lift(oldest, now_s)
        return changed

    # What ingresses share -------------------------------------------------------------------------------------------

    def take_usage(self) -> dict[str, tuple[float, float]]:
        """By tenant: virtual seconds charged since the last call, and the counter's floor. Of those that have any."""
        found = {}
        for tenant in self._tenants.values():
            if tenant.delta or not tenant.is_told:
                found[tenant.name] = (tenant.delta, tenant.counter - tenant.delta)
                tenant.delta, tenant.is_told = 0.0, True
        return found

    def return_usage(self, usage: Mapping[str, tuple[float, float]]) -> None:
        """What `take_usage` gave could not be told."""
        for name, (delta, _) in usage.items():
            if (tenant := self._tenants.get(name)) is not None:
                tenant.delta += delta

    def active(self) -> tuple[str, ...]:
        """Tenants that have requests here."""
        return tuple(name for name in self._open if name != OVERFLOW)

    def least_active(self) -> float | None:
        """The least counter of tenants that are active here; None where none is."""
        while self._active:
            started_at, name = self._active[0]
            tenant = self._tenants.get(name)
            if tenant is not None and tenant.num_open and tenant.started_at == started_at:
                return started_at
            heapq.heappop(self._active)
        return None

    def merge(self, counters: Mapping[str, float], least_active: float | None) -> None:
        """Takes counters as all ingresses together have them, and the least of those active at others."""
        self._remote_floor = least_active
        for name, counter in counters.items():
            tenant = self._tenants.get(name)
            if tenant is None:
                continue
            if tenant.is_merged and counter + tenant.delta > tenant.counter:
                charged = counter + tenant.delta - tenant.counter
                self._leads.charge(name, tenant.weight, charged, self._decayed_s)
            tenant.is_merged = True
            if counter + tenant.delta != tenant.counter:
                tenant.started_at += counter + tenant.delta - tenant.counter
                tenant.counter = counter + tenant.delta
                if tenant.num_open:
                    heapq.heappush(self._active, (tenant.started_at, name))
                self._note_stale(tenant)

    def served(self) -> dict[str, float]:
        """The counter of each tenant, in virtual seconds."""
        return {tenant.name: tenant.counter for tenant in self._tenants.values()}

    # Inside ---------------------------------------------------------------------------------------------------------

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.pop(name, None)
        if tenant is None:
            if len(self._tenants) >= self._config.max_tenants and not self._forget_one():
                return self._overflow
            tenant = _Tenant(name, self._config.weights.get(name, 1.0))
        self._tenants[name] = tenant  # the most recently active
        return tenant

    def _forget_one(self) -> bool:
        idle = next((name for name, tenant in self._tenants.items() if not tenant.num_open), None)
        if idle is not None:
            del self._tenants[idle]
        return idle is not None

    def _activate(self, tenant: _Tenant) -> None:
        least = [floor for floor in (self.least_active(), self._remote_floor) if floor is not None]
        if least:
            self._floor = max(self._floor, min(least))
        tenant.counter = max(tenant.counter, self._floor)
        tenant.started_at, tenant.is_told = tenant.counter, False
        heapq.heappush(self._active, (tenant.started_at, tenant.name))
        if len(self._active) > 4 * len(self._tenants) + 64:
            self._active = [(each.started_at, each.name) for each in self._tenants.values() if each.num_open]
            self._active.append((tenant.started_at, tenant.name))
            heapq.heapify(self._active)

    def _charge(self, request: _Request, cost_s: float, now_s: float) -> None:
        virtual_s = cost_s * request.share
        request.tenant.counter += virtual_s
        request.tenant.delta += virtual_s
        self._leads.charge(request.tenant.name, request.tenant.weight, virtual_s, now_s)
        self._decay(now_s)
        request.service_class.served_s = max(0.0, request.service_class.served_s + cost_s)

    def _decay(self, now_s: float) -> None:
        keep = math.exp(-max(0.0, now_s - self._decayed_s) / self._config.window_s)
        self._decayed_s = max(self._decayed_s, now_s)
        for found in self._classes.values():
            found.served_s *= keep

    def _see(self, tenant: _Tenant, now_s: float) -> dict[str, Order]:
        """A tenant asks for something: one that was alone is perhaps ahead of its share now."""
        is_new = self._leads.see(tenant.name, tenant.weight, now_s)
        return self._look(now_s) if is_new and len(self._leads) == 2 else {}

    def _look(self, now_s: float) -> dict[str, Order]:
        """Tells apart who is ahead of its share; the orders that have changed."""
        changed, most_used = dict[str, Order](), self._most_used(now_s)
        for tenant in self._open.values():
            self._leads.see(tenant.name, tenant.weight, now_s)
            is_ahead = self._is_ahead(tenant, most_used, now_s)
            if is_ahead is not tenant.is_ahead:
                changed |= self._tell_apart(tenant, is_ahead)
        return changed

    def _is_ahead(self, tenant: _Tenant, most_used: float, now_s: float) -> bool:
        """A tenant whose lead says so, unless another has places that was served much more lately: a guest that asks
        for much at once is no equal of a flood.
        """
        leads = self._leads
        has_lead = leads.is_ahead(tenant.name, tenant.grain, now_s)
        return has_lead and MUCH * leads.used(tenant.name, now_s) >= most_used

    def _most_used(self, now_s: float) -> float:
        return max((self._leads.used(name, now_s) for name in self._served), default=0.0)

    def _tell_apart(self, tenant: _Tenant, is_ahead: bool) -> dict[str, Order]:
        tenant.is_ahead = is_ahead
        changed = self._tag(tenant)
        for request in tenant.running.values():
            request.order = request.told(request.order.tag)
            changed[request.request_id] = request.order
        return changed

    def _tell_greatest(self, request: _Request, now_s: float) -> dict[str, Order]:
        """A request comes while no place is free, and no tenant that has one is ahead: the one that was served most
        lately is, if that is much more than what the request's own tenant was and asks for. The orders that changed.

        Leads take seconds to tell, and none counts what a flood took before places ran out.
        """
        owner, leads = request.tenant, self._leads
        is_full = leads.is_short or 0 < self._num_slots < len(self._requests)
        others = [tenant for tenant in self._served.values() if tenant is not owner] if is_full else []
        if owner.is_ahead or not others or any(tenant.is_ahead for tenant in others):
            return {}
        greatest = max(others, key=lambda each: (leads.used(each.name, now_s), each.name))
        wanted = leads.used(owner.name, now_s) + request.estimate_s * request.share
        if leads.used(greatest.name, now_s) <= MUCH * wanted:
            return {}
        leads.put_ahead(greatest.name, greatest.grain, now_s)
        return self._tell_apart(greatest, True)

    def _leave_queue(self, request: _Request) -> None:
        tenant, found = request.tenant, request.service_class
        tenant.waiting.remove(request)
        tenant.pending = max(0.0, tenant.pending - request.estimate_s * request.share) if tenant.waiting else 0.0
        del found.waiting[request.request_id]
        found.num_lifted -= request.is_lifted
        request.is_waiting = False

    def _note_stale(self, tenant: _Tenant) -> None:
        if tenant.waiting and not tenant.is_stale:
            tenant.is_stale = True
            self._stale[tenant.name] = tenant

    def _tag(self, tenant: _Tenant) -> dict[str, Order]:
        """Makes the tags of a tenant's waiting requests anew; those that have changed."""
        changed, tag = {}, tenant.counter
        for request in tenant.waiting:
            order = request.told(tag)
            tag += request.estimate_s * request.share
            if not request.is_lifted and order != request.order:
                request.order = order
                changed[request.request_id] = order
        tenant.pending = tag - tenant.counter
        return changed

    def _lift(self, request: _Request, now_s: float) -> dict[str, Order]:
        """By age, those of a class that is lifted for its share would pass others for as long as any is older."""
        request.is_lifted = True
        request.service_class.num_lifted += 1
        request.order = Order(LIFTED, now_s)
        return {request.request_id: request.order}


def _unlifted(found: _Class) -> list[_Request]:
    return [request for request in found.waiting.values() if not request.is_lifted]
