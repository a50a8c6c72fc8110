"""Two instances on one GPU merge, drop, restore and split under load, and every request keeps its tokens.

NCCL refuses two members on one device, so their collectives go by way of the host, and speeds say nothing. What is
shown: vLLM's CUDA kernels over views of weights and KV, in memory that changes hands, with what runs carried along.

It runs on a CPU as well (`device.py`).
"""

import importlib.util
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from pengserve.planners.types.events import EventKind
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceState
from pengserve.planners.types.strategy import SwitchStrategy
from tests.gpu.device import DEVICE, IS_CUDA
from tests.gpu.figures import note_figure
from tests.support.disturbed import Disturbed
from tests.support.elastic import ElasticCluster, started
from tests.support.streams import make_prompts
from tests.support.traffic import TimedStream, Traffic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200 if IS_CUDA else 900),
    pytest.mark.skipif(IS_CUDA and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

MIB = 1 << 20
MEMORY_BYTES = 512 * MIB if IS_CUDA else 24 * MIB
CHUNK_BYTES = 2 * MIB if IS_CUDA else 64 << 10
# float32 is exact enough to compare tokens; only Triton's attention has it on CUDA. As IEEE, not as TF32.
FLOAT32: dict[str, Any] = {"attention_backend": "TRITON_ATTN", "enforce_eager": True} if IS_CUDA else {}
BFLOAT16: dict[str, Any] = {"dtype": "bfloat16"}
MAX_NLL_DIFFERENCE = 1e-3


@pytest.fixture(scope="module", autouse=True)
def ieee() -> Iterator[None]:
    """Instances inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_F32_DEFAULT", "ieee")
        yield


def shared_cluster(model: Path, engine: dict[str, Any], **changes: Any) -> ElasticCluster:
    """Two instances that change their shape, not started yet."""
    given: dict[str, Any] = {
        "degrees": (2,),
        "max_stages": 2,
        "memory_bytes": MEMORY_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "device": DEVICE,
        "communicator": "direct",
        "peer_timeout_s": 20.0,
        "engine": ({"gpu_memory_utilization": 0.1} if IS_CUDA else {}) | engine,
    }
    return ElasticCluster(model, 2, **(given | changes))


def note_switches(cluster: ElasticCluster, how: str) -> None:
    """Medians of what switches took so far, by kind: in all, and while no step ran."""
    for part in ("commit_s", "cutover_s"):
        times: dict[str, list[float]] = {}
        for event in cluster.events(EventKind.TRANSITION_END):
            times.setdefault(str(event.data["switch"]), []).append(1e3 * float(event.data[part]))
        for switch, found in times.items():
            note_figure(f"{switch}, {how}: {part.removesuffix('_s')}", statistics.median(found), "ms")


@pytest.fixture(scope="module")
def disturbed(model: Path) -> Iterator[Disturbed]:
    with started(shared_cluster(model, FLOAT32)) as cluster, cluster.ingress() as url, Traffic(url) as traffic:
        yield Disturbed(cluster, traffic, count=12, max_tokens=120)


@pytest.mark.parametrize("shape", ["tp2", "pp2"])
@pytest.mark.parametrize("strategy", [SwitchStrategy.CARRY, SwitchStrategy.HARD])
def test_tokens_are_equal_through_a_shape_and_back(disturbed: Disturbed, shape: str, strategy: SwitchStrategy) -> None:
    disturbed.there_and_back(shape, strategy.value, pause_s=0.5, num_within=6)


def test_tokens_are_equal_through_any_sequence(disturbed: Disturbed) -> None:
    disturbed.at_random(5, num_rounds=8, pause_s=0.4)
    ends = disturbed.cluster.events(EventKind.TRANSITION_END)
    assert sum(event.data.get("num_carried", 0) for event in ends) > 0, "what ran goes on with its KV"
    note_switches(disturbed.cluster, "float32")


def test_tokens_are_equal_where_requests_migrate(disturbed: Disturbed) -> None:
    num_migrated = disturbed.to_and_fro()
    note_figure("requests of one GPU that moved from one instance to the other", num_migrated, "")
    assert num_migrated > 0


def test_the_death_of_a_member_costs_no_stream(disturbed: Disturbed) -> None:
    cluster = disturbed.cluster
    cluster.set_layout("tp2")
    running = [(i, disturbed.traffic.start(**request)) for i, request in enumerate(disturbed.requests)]
    time.sleep(0.5)
    began_s = time.monotonic()
    os.kill(cluster.pid(1), 9)
    disturbed.check_all(running)
    note_figure(
        "streams of a tensor-parallel pair go on and end after a member's death", time.monotonic() - began_s, "s"
    )
    cluster.wait_formable()
    cluster.set_layout("dp")
    disturbed.check_memory()


@pytest.mark.parametrize("is_eager", [True, False])
def test_tokens_are_equal_with_kv_on_the_host(model: Path, is_eager: bool) -> None:
    """The device holds a third of what runs: requests are parked, placed and staged at random, and shapes change."""
    if not IS_CUDA and not is_eager:
        pytest.skip("compilation on the CPU has tests of its own")
    given = {
        "engine": {"gpu_memory_utilization": 0.1} | FLOAT32 | {"enforce_eager": is_eager} if IS_CUDA else {},
        "memory_bytes": 17 * MIB if IS_CUDA else 6 * MIB,  # a chunk of weights and one of KV in each of four layers
        "host_bytes": 64 * MIB,
    }
    with started(shared_cluster(model, **given)) as cluster, cluster.ingress() as url, Traffic(url) as traffic:
        prompts = make_prompts(24, seed=4, longest=700)
        expected = [traffic.start(prompt, 40).result(120) for prompt in prompts[:12]]
        expected += [
            traffic.start(prompt, 40, temperature=0.8, seed=i).result(120) for i, prompt in enumerate(prompts[12:])
        ]
        assert not any(stream.error for stream in expected), [stream.error for stream in expected]
        for layout in ("dp", "tp2", "dp", "pp2", "dp"):
            cluster.park_at_random(True)
            running = [traffic.start(prompt, 40) for prompt in prompts[:12]]
            running += [traffic.start(p, 40, temperature=0.8, seed=i) for i, p in enumerate(prompts[12:])]
            time.sleep(0.5)
            cluster.set_layout(layout)
            time.sleep(0.3)
            cluster.require_layout(layout)
            cluster.park("resume")  # what was parked before the switch may be elsewhere now
            for i, (future, alone) in enumerate(zip(running, expected, strict=True)):
                found = future.result(120)
                assert not found.error and found.token_ids == alone.token_ids, (layout, i, found.error)
            cluster.require_memory()
        totals = {
            name: sum(getattr(instance.stats, name) for instance in cluster.snapshot().instances)
            for name in ("total_staged_bytes", "total_brought_bytes", "total_evicted_bytes", "total_parked")
        }
        for name, value in totals.items():
            note_figure(f"{name}, {'eager' if is_eager else 'compiled'}", value, "")
        assert totals["total_evicted_bytes"] + totals["total_parked"] > 0


@pytest.mark.parametrize("is_eager", [True, False])
def test_nll_in_bfloat16_with_the_default_backend(model: Path, is_eager: bool) -> None:
    """What users run: bfloat16, FlashAttention; with compilation and CUDA graphs where `is_eager` is not set."""
    if not IS_CUDA and not is_eager:
        pytest.skip("compilation on the CPU has tests of its own")
    prompts = make_prompts(64, seed=9, longest=120)
    with (
        started(shared_cluster(model, {**BFLOAT16, "enforce_eager": is_eager})) as cluster,
        cluster.ingress() as url,
        Traffic(url) as traffic,
    ):

        def run(layouts: tuple[str, ...]) -> list[TimedStream]:
            running: list[Future[TimedStream]] = [traffic.start(prompt, 96, logprobs=1) for prompt in prompts]
            for layout in layouts:
                time.sleep(0.3)
                cluster.set_layout(layout, "carry")
                time.sleep(0.3)
                cluster.require_layout(layout)
            return [future.result(200) for future in running]

        undisturbed = run(())
        disturbed = run(("tp2", "dp", "pp2", "dp"))
        note_switches(cluster, "eager" if is_eager else "compiled")
        assert sum(event.data.get("num_carried", 0) for event in cluster.events()) > 0
    pairs: list[tuple[float, float]] = []
    for found, expected in zip(disturbed, undisturbed, strict=True):
        assert not found.error and not expected.error, (found.error, expected.error)
        assert len(found.token_ids) == len(expected.token_ids)
        for i, token in enumerate(found.token_ids):
            if token != expected.token_ids[i]:
                break
            pairs.append((found.logprobs[i], expected.logprobs[i]))
    difference = abs(statistics.fmean(found - expected for found, expected in pairs))
    note_figure(f"mean NLL of {len(pairs)} tokens differs, {'eager' if is_eager else 'compiled'}", difference, "nat")
    assert len(pairs) > 1000
    assert difference < MAX_NLL_DIFFERENCE


@pytest.mark.skipif(not IS_CUDA, reason="NCCL is for CUDA")
def test_where_nccl_refuses_a_group_the_instances_serve_alone(model: Path) -> None:
    """NCCL has no group of two members on one device; that costs the group, and nothing else."""
    cluster = shared_cluster(model, FLOAT32, communicator="")
    try:
        cluster.begin()
        cluster.wait(_all_refused)
        with cluster.ingress() as url, Traffic(url) as traffic:
            streams = [traffic.start(prompt, 24).result(60) for prompt in make_prompts(4, seed=1, longest=60)]
        assert all(len(stream.token_ids) == 24 and not stream.error for stream in streams)
        assert all(instance.state is InstanceState.READY for instance in cluster.snapshot().instances)
    finally:
        cluster.stop()


def _all_refused(snapshot: ClusterSnapshot) -> bool:
    """Each instance has tried to build a group, and could not."""
    return all(i.state is InstanceState.READY and i.groups_failed and not i.groups_ready for i in snapshot.instances)
