"""Laws of asynchronous scheduling, vLLM's default on a GPU where no shape changes: tokens are as without it, and a
request that is cut goes on elsewhere as it would have.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("vllm")
from vllm import SamplingParams

from pengserve.planners.types.config import InstanceConfig
from pengserve.replicas.engine.link import InstanceLink
from pengserve.replicas.environment import process_environment
from tests.support import ahead_host
from tests.support.ahead_lane import NUM_PROMPTS
from tests.support.cut_requests import MAX_TOKENS, PROMPTS, SAMPLING, Reader, check_cuts, make_request
from tests.support.processes import CHANNEL_TOKEN, ENGINE, OFFLINE, InstanceProcess, start_instances

pytestmark = pytest.mark.slow

DRAWN = {"seeded", "seeded penalties", "minimum length", "grammar"}  # the two runners draw differently


@pytest.fixture(scope="module")
def ahead(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[InstanceProcess]]:
    """Two instances that schedule ahead, with vLLM's V1 runner. Each has done so in the end."""
    folder = tmp_path_factory.mktemp("ahead")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ahead_host.VARIABLE, str(folder))
        processes = start_instances(model, [0, 1], module="tests.support.ahead_host")
        yield processes
        for process in processes:
            assert process.process.poll() is None, f"instance {process.instance_id} died in a test"
            assert process.stop() == 0
            num_ahead, runner = ahead_host.notes_of(folder, process.process.pid)
            assert num_ahead > 10 and runner == "vllm.v1.worker.cpu_model_runner", (num_ahead, runner)


@pytest_asyncio.fixture(scope="module")
async def readers(ahead: list[InstanceProcess]) -> AsyncIterator[list[Reader]]:
    async with AsyncExitStack() as stack:
        found = []
        for process in ahead:
            link = await InstanceLink.connect(process.endpoint, token=CHANNEL_TOKEN, client_id="test")
            stack.push_async_callback(link.close)
            found.append(Reader(link))
        yield found


@pytest.mark.parametrize("kind", SAMPLING)
async def test_resumed_tokens_equal_undisturbed(readers: list[Reader], kind: str) -> None:
    await check_cuts(*readers, kind, (1, 17, MAX_TOKENS - 1))


@pytest.mark.parametrize("kind", SAMPLING)
async def test_tokens_are_those_without_it(instances: list[InstanceProcess], readers: list[Reader], kind: str) -> None:
    link = await InstanceLink.connect(instances[0].endpoint, token=CHANNEL_TOKEN, client_id=f"plain {kind}")
    plain, (own, _) = Reader(link), readers
    names = [f"{kind} as without/{i}" for i in range(len(PROMPTS))]
    for reader in (plain, own):
        for name, prompt in zip(names, PROMPTS, strict=True):
            reader.link.add(make_request(name, prompt, SAMPLING[kind]))
        await reader.until(names)
    await link.close()
    assert {name: own.tokens[name] for name in names} == {name: plain.tokens[name] for name in names}
    assert {name: own.finished[name] for name in names} == {name: plain.finished[name] for name in names}


async def test_abort_with_a_step_under_way_frees_blocks(readers: list[Reader]) -> None:
    home, _ = readers
    endless = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)
    for round_ in range(4):
        home.link.add(make_request(f"endless {round_}", PROMPTS[0], endless))
        home.link.add(make_request(f"short {round_}", PROMPTS[1], SAMPLING["greedy"]))
        await home.until([f"short {round_}"])
        home.link.abort([f"endless {round_}"])
        home.link.add(make_request(f"after {round_}", PROMPTS[1], SAMPLING["greedy"]))
        await home.until([f"after {round_}"])
        assert f"endless {round_}" not in home.finished
        assert home.tokens[f"after {round_}"] == home.tokens[f"short {round_}"]
        assert (home.link.stats.num_running, home.link.stats.num_waiting) == (0, 0)
        assert home.link.stats.kv_blocks_used == 0


def test_the_v2_runner_takes_requests_over(model: Path, instances: list[InstanceProcess]) -> None:
    """Requests of every kind go on from a cut as they would have, and greedy ones have the V1 runner's tokens."""
    own = process_environment(InstanceConfig(app="tests", model=str(model)))
    command = [sys.executable, "-m", "tests.support.ahead_lane", str(model), json.dumps(ENGINE)]
    environment = {**os.environ, **OFFLINE, **own, **ahead_host.V2_ON_CPU}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))[6:])
    assert found["runner"] == "vllm.v1.worker.cpu.model_runner" and found["num_ahead"] > 50
    assert found["free"][0] == found["free"][1]
    whole, begun, rest = found["whole"], found["begun"], found["rest"]
    assert all(whole.values()) and sum(map(len, rest.values())) > 200
    assert {name: begun[name] + rest[name] for name in whole} == whole
    assert found["short"] == {name: whole[name] for name in found["short"]} and len(found["short"]) == NUM_PROMPTS
    # Of the prompt of 31 tokens a step reads eight and one for each request that runs: it takes three steps, not one.
    assert found["short_steps"] >= 2 + max(map(len, found["short"].values()))

    assert {name: whole[name] for name in whole if name.split("/")[0] not in DRAWN} == asyncio.run(plain(instances[0]))


async def plain(instance: InstanceProcess) -> dict[str, list[int]]:
    """Tokens of the V1 runner without asynchronous scheduling, of requests that draw nothing."""
    link = await InstanceLink.connect(instance.endpoint, token=CHANNEL_TOKEN, client_id="V1")
    reader = Reader(link)
    asked = {f"{kind}/{i}": (kind, i) for kind in set(SAMPLING) - DRAWN for i in range(NUM_PROMPTS)}
    for name, (kind, i) in asked.items():
        link.add(make_request(name, PROMPTS[i], SAMPLING[kind]))
    await reader.until(list(asked))
    await link.close()
    return {name: reader.tokens[name] for name in asked}
