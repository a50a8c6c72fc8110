"""What an ingress makes of shares: orders of requests as vLLM understands them, charges for what they really cost."""

from typing import Any

import pytest

pytest.importorskip("vllm")

from pengserve.cluster.ingress.request.request_options import RequestOptions
from pengserve.cluster.ingress.tenants.fair_queue import FairQueue, fair_queue
from pengserve.planners.fairness import told_band
from pengserve.planners.types.contract import BUILT_IN_CLASSES, Contract
from pengserve.planners.types.ids import Epoch, InstanceId
from pengserve.planners.types.layout import Layout
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot, InstanceState, LaneInfo
from pengserve.planners.types.step_cost import StepCost
from pengserve.planners.types.tenants import FairnessConfig, TenantConfig
from tests.support.moving import CAPACITY, Cluster

ON = FairnessConfig(is_on=True, age_s=1000.0)


def of(tenant: str, service_class: str = "default", priority: int = 0) -> RequestOptions:
    return RequestOptions(contract=Contract(tenant=tenant, service_class=service_class, priority=priority))


class World(Cluster):
    """One instance, and a clock that a test moves."""

    def __init__(self, config: FairnessConfig = ON) -> None:
        self.now_s = 1000.0
        self.fair = FairQueue(config, BUILT_IN_CLASSES, lambda: self.now_s)
        super().__init__(1, fair=self.fair)
        self.link: Any = self.connect(self.instances[0])

    def ask(self, number: int, tenant: str, length: int = 4, **options: Any) -> None:
        self.request(number, length, of(tenant, **options), priority=options.get("priority", 0), max_tokens=length)

    def place(self, number: int) -> tuple[int, float]:
        """Of a request, on its instance."""
        request = self.book._records[f"r{number}"].request
        sent = request.priority, request.arrival_time
        assert self.link.orders.get(f"r{number}", sent) == sent, "the instance knows"
        return sent

    def step(self) -> None:
        self.link.read()
        self.instances[0].step()
        self.deliver(self.link)


def test_without_shares_nothing_is_counted() -> None:
    assert fair_queue(FairnessConfig(), BUILT_IN_CLASSES) is None


def test_a_guest_begins_before_what_a_flood_has_queued() -> None:
    world = World()
    for number in range(50):
        world.ask(number, "flood")
    for _ in range(4):
        world.step()
    world.ask(50, "guest")
    waiting = [number for number in range(50) if not world.seen[number]]
    assert len(waiting) > 40
    assert world.place(50) < min(world.place(number) for number in waiting)


def test_a_flood_is_ahead_of_a_guest_by_one_turn_only() -> None:
    """Else `slo.policy: reject` would refuse the guests of a cluster that a stranger floods."""
    world = World()
    for number in range(50):
        world.ask(number, "flood")
    world.ask(50, "guest")
    flood, guest = (world.book._records[name] for name in ("r0", "r50"))
    queued = sum(r.num_prompt_tokens for r in world.book._records.values()) - guest.num_prompt_tokens
    assert world.fair.queued_before(world.link, guest) == guest.num_prompt_tokens
    assert world.fair.queued_before(world.link, flood) == queued - flood.num_prompt_tokens + guest.num_prompt_tokens


def test_a_tenant_pays_for_what_is_computed_and_held() -> None:
    world = World()
    world.ask(0, "a", length=40)
    world.step()
    assert world.fair.shares.served()["a"] > 0
    before = world.fair.shares.served()["a"]
    for _ in range(39):
        world.now_s += 0.3
        world.step()
        world.book.tend()
    cost = world.fair.cost
    least = cost.prompt_s(3) + cost.decode_s(40, 3)
    assert world.fair.shares.served()["a"] == pytest.approx(least, rel=0.05)
    assert before > 0 and not world.fair._meters


def test_a_request_that_never_ran_costs_nothing() -> None:
    world = World()
    world.ask(0, "a")
    world.abort(0)
    assert world.fair.shares.served() == {"a": 0.0} and not world.fair._meters


def test_what_is_lifted_is_told_to_the_instance_and_survives_its_death() -> None:
    world = World()
    world.ask(0, "a", service_class="flex", priority=1)
    assert world.place(0)[0] == told_band(1, is_ahead=False)
    world.now_s += 1001.0
    world.book.tend()
    assert world.place(0)[0] < -(1 << 31)
    world.instances[0].cut(0, refuses=False)
    world.deliver(world.link)
    [record] = world.book._waiting
    assert record.request.priority < -(1 << 31) and record.priority == 1 and not record.is_urgent


def test_weights_count() -> None:
    world = World(FairnessConfig(is_on=True, tenants={"large": TenantConfig(weight=4.0)}))
    for number in range(20):
        world.ask(number, "large" if number % 2 else "small")
    assert world.place(19)[1] == pytest.approx(world.place(18)[1] / 4)


def test_a_million_tenants_need_no_more_memory_than_the_bound() -> None:
    world = World(FairnessConfig(is_on=True, max_tenants=5))
    for number in range(40):
        world.ask(number, f"t{number}", length=1)
        world.step()
    assert world.fair.shares.num_tenants == 5 and len(world.fair._usual) == 5


def test_prices_are_those_of_the_instances_and_held_memory_costs() -> None:
    world = World()
    assert world.fair.cost.memory_s(100, 1.0) == 0.0
    cost = StepCost(load_s=0.1, token_s=0.01, extra_s=0.0, seq_s=0.0, context_s=0.0, pair_s=0.0)
    ready = InstanceSnapshot(
        key=world.instances[0].key,
        state=InstanceState.READY,
        capacity=CAPACITY,
        lanes=(LaneInfo(shape="dp", capacity=CAPACITY, step_cost=cost),),
    )
    layout = Layout.all_dp((InstanceId(0),), Epoch(0))
    world.fair.follow(ClusterSnapshot(app="tests", time_s=0.0, layout=layout, instances=(ready,)))
    assert world.fair.cost.prompt_s(10) == pytest.approx(0.1)
    assert world.fair.cost.memory_s(CAPACITY.num_tokens // 2, 4.0) == pytest.approx(2.0)
    costs = []
    for number, held_s in ((0, 0.0), (2, 600.0)):
        tenant = f"t{number}"
        world.ask(number, tenant, length=3)
        world.step()
        world.now_s += held_s
        world.step()
        world.step()
        costs.append(world.fair.shares.served()[tenant] - (costs[0] if costs else 0.0))
    assert costs[1] - costs[0] == pytest.approx(6 / CAPACITY.num_tokens * 600, rel=0.01)
