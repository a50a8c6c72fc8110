"""Law: a request cut after any number of output tokens and resumed elsewhere goes on exactly as it would have."""

from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio

pytest.importorskip("vllm")
from vllm import SamplingParams

from pengserve.planners.types.errors import LinkLostError
from pengserve.replicas.engine.link import InstanceLink
from tests.support.cut_requests import MAX_TOKENS, PROMPTS, SAMPLING, Reader, check_cuts, make_request, reading
from tests.support.processes import CHANNEL_TOKEN, InstanceProcess

pytestmark = pytest.mark.slow


@pytest_asyncio.fixture(scope="module")
async def readers(instances: list[InstanceProcess]) -> AsyncIterator[list[Reader]]:
    async with reading(instances) as found:
        yield found


@pytest.mark.parametrize("kind", SAMPLING)
async def test_resumed_tokens_equal_undisturbed(readers: list[Reader], kind: str) -> None:
    await check_cuts(*readers, kind, (1, 17, MAX_TOKENS - 1))


async def test_stats_return_to_idle(readers: list[Reader]) -> None:
    home, _ = readers
    home.link.add(make_request("idle", PROMPTS[0], SAMPLING["greedy"]))
    await home.until(["idle"])
    assert (home.link.stats.num_running, home.link.stats.num_waiting, home.link.stats.kv_blocks_used) == (0, 0, 0)
    assert home.link.stats.queued_tokens == 0


async def test_abort_frees_blocks_and_stops_tokens(readers: list[Reader]) -> None:
    home, _ = readers
    endless = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)
    home.link.add(make_request("endless", PROMPTS[0], endless))
    home.link.add(make_request("short", PROMPTS[1], SAMPLING["greedy"]))
    await home.until(["short"])
    home.link.abort(["endless"])
    home.link.add(make_request("after", PROMPTS[1], SAMPLING["greedy"]))
    await home.until(["after"])
    assert "endless" not in home.finished
    assert len(home.tokens["endless"]) < 900
    assert home.link.stats.kv_blocks_used == 0


async def test_requests_of_a_lost_client_are_aborted(instances: list[InstanceProcess], readers: list[Reader]) -> None:
    home, _ = readers
    guest = await InstanceLink.connect(instances[0].endpoint, token=CHANNEL_TOKEN, client_id="guest")
    guest.add(make_request("orphan", PROMPTS[2], SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)))
    await anext(guest.events())
    await guest.close()
    for attempt in range(20):
        home.link.add(make_request(f"witness {attempt}", PROMPTS[0], SAMPLING["greedy"]))
        await home.until([f"witness {attempt}"])
        if home.link.stats.num_running == 0:
            return
    raise AssertionError("the orphan still runs")


async def test_wrong_token_is_refused(instances: list[InstanceProcess]) -> None:
    with pytest.raises(LinkLostError, match="wrong channel token"):
        await InstanceLink.connect(instances[0].endpoint, token="guess", client_id="stranger")


async def test_garbage_closes_only_the_sender(instances: list[InstanceProcess], readers: list[Reader]) -> None:
    import asyncio

    host, port = instances[0].endpoint.split(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00" * 64):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        with suppress(ConnectionResetError):  # the listener closed before it had read all of it
            async with asyncio.timeout(10):
                await reader.read()
        writer.close()
    home, _ = readers
    home.link.add(make_request("unharmed", PROMPTS[0], SAMPLING["greedy"]))
    await home.until(["unharmed"])


async def test_capacity_is_what_the_checkpoint_and_the_configuration_say(readers: list[Reader]) -> None:
    capacity = readers[0].link.capacity
    assert capacity.bytes_per_block == 4 * 2 * 2 * 32 * 32 * 4  # layers, K and V, KV heads, head size, tokens, float32
    assert capacity.num_blocks == (32 << 20) // capacity.bytes_per_block - 1
    assert capacity.weight_bytes == WEIGHT_BYTES


WEIGHT_BYTES = 4 * (2 * 512 * 128 + 4 * (128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256 + 2 * 128) + 128)
