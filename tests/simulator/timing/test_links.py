"""Links in virtual time: bytes are conserved, ports are shared, activations go first."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pengserve.simulator.clock import run_virtual
from pengserve.simulator.hardware.catalog import gpu
from pengserve.simulator.timing.links import ClusterLinks, Kind, Latencies
from tests.support.effort import examples

MIB = 1 << 20
NODES = (0, 0, 0, 0, 1, 1)
GPU = replace(gpu("h100"), nvlink_bytes_per_s=400.0 * MIB, nic_bytes_per_s=50.0 * MIB, pcie_bytes_per_s=25.0 * MIB)
BARE = Latencies(chunk_bytes=MIB)
Send = Callable[[float, int | None, int | None, int, Kind], Coroutine[Any, Any, float]]


def ends(*sends: tuple[float, int | None, int | None, int, Kind], device=GPU, latencies=BARE) -> list[float]:
    """When each ends that was sent as `(at, src, dst, bytes, kind)`."""

    async def main() -> list[float]:
        links = ClusterLinks(device, NODES, latencies)
        loop = asyncio.get_running_loop()

        async def send(at_s: float, src: int | None, dst: int | None, num_bytes: int, kind: Kind) -> float:
            await asyncio.sleep(at_s)
            await links.transfer(src, dst, num_bytes, kind)
            return loop.time()

        return await asyncio.gather(*(send(*one) for one in sends))

    return run_virtual(main())


@pytest.mark.parametrize(
    ("src", "dst", "rate"), [(0, 1, 400.0), (0, 4, 50.0), (0, None, 25.0), (None, 3, 25.0)], ids=str
)
def test_alone_it_takes_its_bytes_over_the_bandwidth(src, dst, rate):
    assert ends((0.0, src, dst, 100 * MIB, Kind.KV)) == [pytest.approx(100.0 / rate)]


def test_latency_comes_on_top():
    latencies = Latencies(nic_s=0.25)
    assert ends((0.0, 0, 4, 50 * MIB, Kind.KV), latencies=latencies) == [pytest.approx(1.25)]


def test_alone_s_is_what_a_transfer_alone_takes():
    latencies = Latencies(nvlink_s=0.1, nic_s=0.2, pcie_s=0.3)
    for src, dst in ((0, 1), (0, 4), (None, 2), (2, None), (3, 3)):
        asked = ClusterLinks(GPU, NODES, latencies).alone_s(src, dst, 7 * MIB)
        assert ends((0.0, src, dst, 7 * MIB, Kind.KV), latencies=latencies) == [pytest.approx(asked)]


@pytest.mark.parametrize("kinds", [(Kind.KV, Kind.KV), (Kind.KV, Kind.WEIGHTS), (Kind.ACTIVATION, Kind.ACTIVATION)])
def test_two_of_one_class_share_a_port(kinds):
    long, short = ends((0.0, 0, 4, 100 * MIB, kinds[0]), (0.0, 0, 5, 50 * MIB, kinds[1]))
    assert short == pytest.approx(2.0)
    assert long == pytest.approx(3.0)


def test_the_receiver_s_port_is_shared_too():
    assert ends((0.0, 0, 4, 50 * MIB, Kind.KV), (0.0, 1, 4, 50 * MIB, Kind.KV)) == [pytest.approx(2.0)] * 2


def test_other_ports_are_not():
    sent = [(0.0, 0, 4, 50 * MIB, Kind.KV), (0.0, 1, 5, 50 * MIB, Kind.KV), (0.0, 4, 0, 50 * MIB, Kind.KV)]
    assert ends(*sent) == [pytest.approx(1.0)] * 3


def test_without_nvlink_peers_and_host_share_the_same_lanes():
    device = replace(GPU, nvlink_bytes_per_s=0.0)
    sent = [(0.0, 0, 1, 25 * MIB, Kind.KV), (0.0, 0, None, 25 * MIB, Kind.KV)]
    assert ends(*sent, device=device) == [pytest.approx(2.0)] * 2


def test_an_activation_delays_kv_by_what_it_takes():
    kv, activation = ends((0.0, 0, 4, 100 * MIB, Kind.KV), (1.0, 0, 4, 25 * MIB, Kind.ACTIVATION))
    assert activation - 1.0 == pytest.approx(0.5)
    assert kv == pytest.approx(2.5)


def test_an_activation_elsewhere_delays_nothing():
    kv, _ = ends((0.0, 0, 4, 100 * MIB, Kind.KV), (1.0, 1, 5, 25 * MIB, Kind.ACTIVATION))
    assert kv == pytest.approx(2.0)


@given(at_s=st.floats(0.0, 1.9))
@settings(max_examples=examples(50))
def test_an_activation_waits_for_no_more_than_a_chunk(at_s):
    chunk_s = BARE.chunk_bytes / GPU.nic_bytes_per_s
    _, activation = ends((0.0, 0, 4, 100 * MIB, Kind.WEIGHTS), (at_s, 0, 4, 5 * MIB, Kind.ACTIVATION))
    assert 0.1 - 1e-9 <= activation - at_s <= 0.1 + chunk_s + 1e-9


def test_a_cancelled_transfer_leaves_its_ports():
    async def main() -> float:
        links = ClusterLinks(GPU, NODES, BARE)
        lost = asyncio.create_task(links.transfer(0, 4, 1000 * MIB, Kind.KV))
        kept = asyncio.create_task(links.transfer(0, 4, 50 * MIB, Kind.KV))
        await asyncio.sleep(1.0)
        lost.cancel()
        await kept
        assert links.sent_bytes == {Kind.ACTIVATION: 0, Kind.KV: 50 * MIB, Kind.WEIGHTS: 0}
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(1.5)


PLACES = st.one_of(st.none(), st.integers(0, 5))
SENDS = st.lists(
    st.tuples(st.floats(0.0, 3.0), PLACES, PLACES, st.integers(0, 80 * MIB), st.sampled_from(list(Kind))).filter(
        lambda sent: sent[1] is not None or sent[2] is not None
    ),
    min_size=1,
    max_size=12,
)


@given(sends=SENDS)
@settings(max_examples=examples(60))
def test_no_port_passes_more_than_its_rate_and_everything_arrives(sends):
    done = ends(*sends)
    for instance in range(len(NODES)):
        for link, rate in (("nic", GPU.nic_bytes_per_s), ("pcie", GPU.pcie_bytes_per_s)):
            mine = [
                (sent[0], end, sent[3])
                for sent, end in zip(sends, done, strict=True)
                if sent[1] == instance and sent[2] != instance and link_of(sent) == link
            ]
            for first_s, _, _ in mine:
                inside = [(end, num) for at_s, end, num in mine if at_s >= first_s]
                last_s = max(end for end, _ in inside)
                assert sum(num for _, num in inside) <= rate * (last_s - first_s) * (1 + 1e-6) + 1.0


@given(sends=SENDS)
@settings(max_examples=examples(30))
def test_the_same_transfers_end_at_the_same_times(sends):
    assert ends(*sends) == ends(*sends)


def link_of(sent: tuple[float, int | None, int | None, int, Kind]) -> str:
    if sent[1] is None or sent[2] is None:
        return "pcie"
    return "peer" if NODES[sent[1]] == NODES[sent[2]] else "nic"
