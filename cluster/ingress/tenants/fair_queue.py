"""The order in which an ingress's requests begin on instances: shares of tenants, told in vLLM's own terms.

vLLM's scheduler begins requests by `(priority, arrival_time)`, the least first, where its policy is `priority`. What
`planners.fairness` says of a request goes there as it is: its band as the priority, and its tag as the arrival time,
which vLLM's engine uses for nothing else. A request that waits on an instance gets its new order in a REORDER frame.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.cluster.ingress.tenants.queued_tokens import QueuedTokens
from pengserve.planners.dispatch import kv_tokens
from pengserve.planners.fairness import FairConfig, FairShares, Order
from pengserve.planners.service_cost import ServiceCost
from pengserve.planners.types.contract import ServiceClass
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceState
from pengserve.planners.types.step_cost import NOMINAL
from pengserve.planners.types.tenants import FairnessConfig
from pengserve.replicas.engine.link import InstanceLink

PERIOD_S = 0.25  # between two looks at what running requests have cost
USUAL_TOKENS = 128.0  # of an answer, where nothing is known of a tenant
LEARN = 0.1  # weight of a tenant's newest answer in its usual length


@dataclass(slots=True)
class _Meter:
    """What a running request was charged for."""

    record: RequestRecord
    since_s: float = 0.0
    num_tokens: int = 0  # of its answer


class FairQueue:
    """Belongs to the event loop. The book of records tells it what becomes of requests."""

    def __init__(
        self,
        config: FairnessConfig,
        classes: Mapping[str, ServiceClass],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: seconds that all ingresses count alike, as the oldest of all their requests may go first."""
        weights = {name: tenant.weight for name, tenant in config.tenants.items()}
        planner = FairConfig(weights=weights, classes=classes, age_s=config.age_s, max_tenants=config.max_tenants)
        self.shares = FairShares(planner)
        self.cost = ServiceCost()
        self._clock, self._max_tenants = clock, config.max_tenants
        self._meters: dict[str, _Meter] = {}  # by request id
        self._queued = QueuedTokens()
        self._usual: dict[str, float] = {}  # tokens of a tenant's answers
        self._looked_s = 0.0

    def come(self, record: RequestRecord) -> None:
        """A request is in the book; others of its tenant may have another order."""
        request, contract = record.request, record.options.contract
        self._meters[request.request_id] = _Meter(record)
        orders = self.shares.add(
            request.request_id,
            contract.tenant,
            contract.service_class,
            record.priority,
            self._estimate_s(record),
            self._clock(),
        )
        self._tell(orders)

    def begun(self, record: RequestRecord) -> None:
        """The first token of a request is there: its prompt was computed."""
        meter, now_s = self._meters.get(record.request.request_id), self._clock()
        if meter is None:
            return
        meter.since_s, cached = now_s, record.num_cached_tokens
        cost_s = self.cost.prompt_s(record.num_prompt_tokens - cached, cached)
        self.shares.charge(record.request.request_id, cost_s, now_s)

    def ended(self, record: RequestRecord) -> None:
        """The book forgets a request."""
        request_id = record.request.request_id
        meter = self._meters.pop(request_id, None)
        if meter is None:
            return
        now_s, tenant = self._clock(), record.options.contract.tenant
        self._charge(meter, now_s)
        self.shares.end(request_id, now_s)
        usual = self._usual.pop(tenant, USUAL_TOKENS)
        while len(self._usual) >= self._max_tenants:
            del self._usual[next(iter(self._usual))]
        self._usual[tenant] = usual + LEARN * (len(record.output_token_ids) - usual)

    def prioritize(self, record: RequestRecord, priority: int) -> None:
        """A request has another priority from now on."""
        self._tell(self.shares.prioritize(record.request.request_id, priority))

    def queued_before(self, link: InstanceLink, record: RequestRecord) -> int:
        """Prompt tokens on an instance that begin before those of a request: all of its own tenant's, and as many of
        each other tenant's, which take their turns with it.
        """
        in_flight = (meter.record for meter in self._meters.values())
        return self._queued.before(link, record, in_flight, len(self._meters), self._clock())

    def follow(self, snapshot: ClusterSnapshot) -> None:
        """Takes prices from the first instance that is ready: what its steps cost as profiled, and its KV."""
        ready = next((i for i in snapshot.instances if i.state is InstanceState.READY and i.capacity is not None), None)
        if ready is None or ready.capacity is None:
            return
        step = next((lane.step_cost for lane in ready.lanes if lane.shape == "dp" and lane.step_cost), NOMINAL)
        self.cost = ServiceCost(step=step, capacity_tokens=kv_tokens(ready.stats, ready.capacity))

    def tend(self, num_places: int, *, is_short: bool = True, num_slots: int = 0) -> None:
        """Charges running requests and renews the order, at most once in `PERIOD_S`.

        Args:
            num_places: instances, each of which can begin a lifted request.
            is_short: whether requests wait on an instance for a place.
            num_slots: requests that all instances together step at once; 0: not known.
        """
        now_s = self._clock()
        if 0 <= now_s - self._looked_s < PERIOD_S:
            return
        self._looked_s = now_s
        for meter in self._meters.values():
            if len(meter.record.output_token_ids) > meter.num_tokens:
                self._charge(meter, now_s)
        self._tell(self.shares.tend(now_s, num_places, is_short=is_short, num_slots=num_slots))

    # Inside ---------------------------------------------------------------------------------------------------------

    def _estimate_s(self, record: RequestRecord) -> float:
        params = record.request.sampling_params
        usual = self._usual.get(record.options.contract.tenant, USUAL_TOKENS)
        most = params.max_tokens if params is not None and params.max_tokens is not None else usual
        num_tokens = int(min(usual, most)) + 1
        prompt = record.num_prompt_tokens
        return self.cost.prompt_s(prompt) + self.cost.decode_s(num_tokens, prompt)

    def _charge(self, meter: _Meter, now_s: float) -> None:
        """Charges what a request has generated, and the memory it has held, since the last time."""
        record = meter.record
        num_new = len(record.output_token_ids) - meter.num_tokens
        if num_new <= 0 or not meter.since_s:
            return
        cost_s = self.cost.decode_s(num_new, record.num_tokens)
        cost_s += self.cost.memory_s(record.num_tokens, max(0.0, now_s - meter.since_s))
        meter.num_tokens, meter.since_s = len(record.output_token_ids), now_s
        self.shares.charge(record.request.request_id, cost_s, now_s)

    def _tell(self, orders: Mapping[str, Order]) -> None:
        """Puts orders into the requests, and tells the instances where they are."""
        by_link: defaultdict[InstanceLink, list[tuple[str, int, float]]] = defaultdict(list)
        for request_id, order in orders.items():
            meter = self._meters.get(request_id)
            if meter is None:
                continue
            record = meter.record
            record.request.priority, record.request.arrival_time = order.band, order.tag
            if record.link is not None:
                by_link[record.link].append((record.wire_id, order.band, order.tag))
        for link, changed in by_link.items():
            link.reorder(changed)


def fair_queue(config: FairnessConfig, classes: Mapping[str, ServiceClass]) -> FairQueue | None:
    """None where requests begin in the order in which they come: then nothing is counted."""
    return FairQueue(config, classes) if config.is_on else None
