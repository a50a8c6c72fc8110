"""Laws of asynchronous scheduling, vLLM's default on a GPU where no shape changes: tokens are as without it, and a
request that is cut goes on elsewhere as it would have.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("vllm")
from vllm import SamplingParams

from pengserve.replicas.engine.link import InstanceLink
from tests.support import ahead_host
from tests.support.cut_requests import PROMPTS, SAMPLING, Reader, check_cuts, make_request
from tests.support.processes import CHANNEL_TOKEN, InstanceProcess, start_instances

pytestmark = pytest.mark.slow

RUNNERS = {"V1": {}, "V2": ahead_host.V2_ON_CPU}
MODULES = {"V1": "vllm.v1.worker.cpu_model_runner", "V2": "vllm.v1.worker.cpu.model_runner"}
DRAWN = {"seeded", "seeded penalties", "minimum length", "grammar"}  # the two runners draw differently
CUTS = (1, 17, 39)


@pytest.fixture(scope="module", params=list(RUNNERS))
def runner(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def ahead(model: Path, runner: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[InstanceProcess]]:
    """Two instances that schedule ahead. Each has done so in the end."""
    folder = tmp_path_factory.mktemp("ahead")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {ahead_host.VARIABLE: str(folder), **RUNNERS[runner]}.items():
            patch.setenv(name, value)
        processes = start_instances(model, [0, 1], module="tests.support.ahead_host")
        yield processes
        for process in processes:
            assert process.process.poll() is None, f"instance {process.instance_id} died in a test"
            assert process.stop() == 0
            num_ahead, module = ahead_host.notes_of(folder, process.process.pid)
            assert num_ahead > 10, "steps were scheduled ahead"
            assert module == MODULES[runner]


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
    await check_cuts(*readers, kind, CUTS)


@pytest.mark.parametrize("kind", SAMPLING)
async def test_tokens_are_those_without_it(
    instances: list[InstanceProcess], readers: list[Reader], runner: str, kind: str
) -> None:
    if runner == "V2" and kind in DRAWN:
        pytest.skip("V2 draws by seed and position, V1 by a generator")
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
