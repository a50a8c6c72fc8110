"""Orders about requests of a simulated instance with a host tier are those of production, and do the same."""

import asyncio
from typing import Any

import pytest

from pengserve.planners.types.errors import FenceError, StepError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.orders import Migrate, Park, Place, Resume
from pengserve.simulator.build import machine_of, setup_of
from pengserve.simulator.clock import run_virtual
from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.engine.cluster import SimCluster
from pengserve.simulator.engine.gaps import GapCounter
from pengserve.simulator.engine.port import SimPort
from pengserve.simulator.requests import Arrival, LiveRequest

KEY = InstanceKey(instance_id=InstanceId(0), incarnation=1)
OTHER = InstanceKey(instance_id=InstanceId(0), incarnation=2)


class Owner:
    """Follows no request."""

    def moved(self, requests: Any, to: Any, *, carried: bool) -> None:
        """Nothing."""

    def lost(self, key: InstanceKey, requests: Any) -> None:
        """Nothing."""

    def ended(self, requests: Any) -> None:
        """Nothing."""

    def touched(self, key: InstanceKey) -> None:
        """Nothing."""

    def stepped(self, key: InstanceKey) -> None:
        """Nothing."""


def cluster_of(host_bytes: int) -> SimCluster:
    data = {"gpu": "l20", "model": "llama2-7b", "instances": 1, "host_bytes": host_bytes, "max_model_len": 2000}
    config = SimulationConfig.parse({"cluster": data, "scheduler": "vllm"})
    machine = machine_of(config, setup_of(config))
    cluster = machine.cluster(Owner(), GapCounter())
    cluster.create(KEY)
    return cluster


def live(name: str, output_tokens: int = 100) -> LiveRequest:
    return LiveRequest(Arrival(request_id=name, at_s=0.0, prompt_tokens=200, output_tokens=output_tokens))


def test_a_parked_request_waits_for_its_order_and_goes_on_without_computing_again() -> None:
    async def run() -> None:
        cluster, one, two = cluster_of(10**10), live("one"), live("two")
        port, instance = SimPort(cluster), cluster.find(KEY)
        await asyncio.sleep(0.01)
        for request in (one, two):
            instance.add(request)
        await asyncio.sleep(1.0)
        await port.order(KEY, [Park(order_id="p", instance=KEY, request_ids=("one",))])
        had = one.num_generated
        assert 0 < had < 100
        await asyncio.sleep(20.0)
        assert one.num_generated == had
        assert two.is_done
        await port.order(KEY, [Park(order_id="p", instance=KEY, request_ids=("one",))])  # twice: nothing changes
        await port.order(KEY, [Resume(order_id="r", instance=KEY, request_ids=("one",))])
        await asyncio.sleep(20.0)
        assert one.is_done
        assert one.num_preemptions == 0

    run_virtual(run())


def test_a_placed_request_is_slower_and_its_layers_are_staged() -> None:
    async def seconds(layers: tuple[int, ...]) -> tuple[float, float]:
        cluster, one = cluster_of(10**10), live("one", 600)
        await asyncio.sleep(0.01)
        cluster.find(KEY).add(one)
        await asyncio.sleep(1.0)
        await SimPort(cluster).order(KEY, [Place(order_id="p", instance=KEY, request_id="one", layers=layers)])
        await asyncio.sleep(100.0)
        assert one.is_done
        scheduler = cluster.find(KEY).lane.scheduler
        return one.last_token_s or 0.0, scheduler.copied()["total_staged_bytes"]  # type: ignore[attr-defined]

    (plain_s, nothing), (placed_s, staged) = (run_virtual(seconds(layers)) for layers in ((), tuple(range(0, 32, 2))))
    assert nothing == 0
    assert staged > 0
    assert placed_s >= plain_s


def test_orders_that_cannot_be_are_refused() -> None:
    async def run() -> None:
        cluster = cluster_of(10**10)
        await asyncio.sleep(0.01)
        with pytest.raises(FenceError):
            await SimPort(cluster).order(KEY, [Park(order_id="p", instance=OTHER, request_ids=("one",))])
        with pytest.raises(StepError, match="migrates"):
            await SimPort(cluster).order(KEY, [Migrate(order_id="m", source=KEY, target=OTHER)])
        bare = cluster_of(0)
        await asyncio.sleep(0.01)
        with pytest.raises(StepError, match="host_bytes"):
            await SimPort(bare).order(KEY, [Park(order_id="p", instance=KEY, request_ids=("one",))])

    run_virtual(run())
