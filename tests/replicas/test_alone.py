"""Law: a fault while something optional is built leaves the instance serving alone, and its lanes say why."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("vllm")
from vllm import SamplingParams

from pengserve.controller.process_port import ProcessPort
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.directory import GroupSpec, PeerAddress, PeerDirectory
from pengserve.planners.types.ids import InstanceId, InstanceKey, Version
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import InstanceSnapshot, InstanceState
from pengserve.replicas.engine.link import InstanceLink
from tests.support.broken_host import VARIABLE
from tests.support.processes import CHANNEL_TOKEN, ENGINE, OFFLINE, START_TIMEOUT_S, InstanceProcess
from tests.support.vllm_requests import sent_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HOST = ("-m", "tests.support.broken_host")
MEMORY_BYTES = 16 << 20
PROMPT, NUM_TOKENS = [17, 300, 45, 9, 120], 24
LANES, AGENT = (InstanceKey(instance_id=InstanceId(i), incarnation=0) for i in (0, 2))
FAULTS = {
    LANES: "pengserve.replicas.engine.groups.tp_lane:TpLane.__init__=RuntimeError@0;"
    "pengserve.replicas.engine.lanes.base_memory:BaseMemory._take=AssertionError@2",  # two layers have moved
    AGENT: "pengserve.replicas.comm.peers:PeerNetwork.__init__=AssertionError@0;"
    "pengserve.replicas.engine.worker:adopt_state=ValueError@0",
}


@dataclass
class Broken:
    """Instances with faults, and how they are reached."""

    port: ProcessPort

    async def wait(self, key: InstanceKey, what: Callable[[InstanceSnapshot], bool]) -> InstanceSnapshot:
        """Waits until an instance says so; it must not die meanwhile."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not what(snapshot := await self.port.status(key)):
            assert snapshot.state is not InstanceState.DEAD, snapshot.failure
            assert time.monotonic() < deadline_s, f"it did not happen: {snapshot}"
            await asyncio.sleep(0.1)
        return snapshot


@pytest_asyncio.fixture(scope="module")
async def broken(model: Path) -> AsyncIterator[Broken]:
    engine = {name: value for name, value in ENGINE.items() if name != "kv_cache_memory_bytes"}
    config = InstanceConfig(
        app="tests",
        model=str(model),
        engine=engine,
        channel_token=CHANNEL_TOKEN,
        degrees=(2,),
        max_stages=2,
        memory_bytes=MEMORY_BYTES,
        chunk_bytes=64 << 10,
        peer_timeout_s=0.5,  # no peer ever comes
    )
    port = ProcessPort(
        config,
        python=sys.executable,
        command=HOST,
        environment=OFFLINE,
        environment_of=lambda key: {VARIABLE: FAULTS[key]},
    )
    try:
        found = Broken(port)
        for key in FAULTS:
            await port.create(key)
        for key in FAULTS:
            await found.wait(key, lambda snapshot: snapshot.state is InstanceState.READY)
        yield found
    finally:
        await port.close()


async def answer(endpoint: str, half: Sequence[int] = ()) -> list[int]:
    """Greedy tokens from an instance, after those of `half`; none where it refuses to go on from there."""
    link = await InstanceLink.connect(endpoint, token=CHANNEL_TOKEN, client_id="test")
    request = sent_request("one", PROMPT, SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True))
    link.add(request, half)
    tokens: list[int] = []
    async with asyncio.timeout(120):
        async for batch in link.events():
            for output in batch.outputs.outputs:
                tokens += output.new_token_ids
            if any(output.finish_reason is not None for output in batch.outputs.outputs):
                break
    await link.close()
    return tokens


def why_not(snapshot: InstanceSnapshot) -> dict[str, str]:
    """Reasons by shape."""
    return {lane.shape: lane.why_not for lane in snapshot.lanes if lane.capacity is None}


async def test_faults_while_lanes_and_their_memory_are_built(broken: Broken, instances: list[InstanceProcess]) -> None:
    other = replace(LANES, instance_id=InstanceId(1))
    groups = tuple(
        GroupSpec(group=Group(kind=kind, members=(InstanceId(0), InstanceId(1))), members=(LANES, other))
        for kind in (GroupKind.TP, GroupKind.PP)
    )
    peers = (PeerAddress(key=other, endpoint="127.0.0.1:9"),)  # the discard port, where there is no listener
    await broken.port.connect(LANES, PeerDirectory(version=Version(term=9, counter=0), peers=peers, groups=groups))
    told = await broken.wait(LANES, lambda snapshot: len(why_not(snapshot)) == 2)
    assert why_not(told) == {
        "tp2": "its lane cannot be built (RuntimeError: a fault of the test)",
        "pp2": "weights and KV share no memory here (AssertionError: a fault of the test)",
    }
    log = (broken.port.directory / f"{LANES}.log").read_text()
    assert log.count("RuntimeError: a fault of the test") == 2, "one line of the log, and one traceback"
    assert log.count("AssertionError: a fault of the test") == 3, "the same, and the line about the pipeline's lane"
    assert await answer(told.endpoint) == await answer(instances[0].endpoint)
    assert told.capacity is not None
    kv_bytes = told.capacity.num_blocks * told.capacity.bytes_per_block
    assert MEMORY_BYTES // 2 < kv_bytes + told.capacity.weight_bytes <= MEMORY_BYTES
    assert (await broken.port.status(LANES)).state is InstanceState.READY
    assert await broken.port.check(LANES) == ()


async def test_a_fault_while_the_agent_is_built(broken: Broken, instances: list[InstanceProcess]) -> None:
    told = await broken.port.status(AGENT)
    reason = "this instance works alone (AssertionError: a fault of the test)"
    assert why_not(told) == {"tp2": reason, "pp2": reason}
    assert (told.peer_endpoint, told.groups_ready) == ("", ())
    log = (broken.port.directory / f"{AGENT}.log").read_text()
    assert log.count("AssertionError: a fault of the test") == 2, "one line of the log, and one traceback"
    assert await answer(told.endpoint) == await answer(instances[0].endpoint)


async def test_a_request_that_cannot_be_taken_over_ends_alone(broken: Broken, instances: list[InstanceProcess]) -> None:
    told = await broken.port.status(AGENT)
    assert await answer(told.endpoint, half=[40, 41]) == []
    assert await answer(told.endpoint) == await answer(instances[0].endpoint)
    after = await broken.wait(AGENT, lambda snapshot: snapshot.stats.num_running + snapshot.stats.num_waiting == 0)
    assert (after.state, after.stats.kv_blocks_used) == (InstanceState.READY, 0)
