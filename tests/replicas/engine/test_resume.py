"""Law: a request cut after any number of output tokens and resumed elsewhere goes on exactly as it would have."""

import random
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from pengserve.planners.types.errors import LinkLostError
from pengserve.replicas.engine.link import InstanceLink, Paused, StepBatch
from pengserve.replicas.engine.vllm_seam import EngineCoreRequest, FinishReason
from tests.support.processes import CHANNEL_TOKEN, InstanceProcess
from tests.support.vllm_requests import sent_request

pytestmark = pytest.mark.slow

MAX_TOKENS = 40
TIMEOUT_S = 240.0
SAMPLING = {
    "greedy": SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, top_p=0.9, seed=7, ignore_eos=True),
    "penalties": SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0, frequency_penalty=1.0, repetition_penalty=1.3, ignore_eos=True
    ),
    "seeded penalties": SamplingParams(
        max_tokens=MAX_TOKENS, temperature=1.0, seed=11, presence_penalty=0.7, top_k=40, ignore_eos=True
    ),
    "minimum length": SamplingParams(max_tokens=MAX_TOKENS, min_tokens=20, temperature=0.8, seed=3),
    "logprobs": SamplingParams(max_tokens=MAX_TOKENS, temperature=0, logprobs=3, ignore_eos=True),
    "grammar": SamplingParams(
        max_tokens=MAX_TOKENS,
        temperature=0.9,
        seed=5,
        structured_outputs=StructuredOutputsParams(regex="([a-f]{3}[0-9]{3}[u-z]{3}){6,60}"),
    ),
    "recursive grammar": SamplingParams(
        max_tokens=MAX_TOKENS,
        temperature=0,
        structured_outputs=StructuredOutputsParams(
            grammar='root ::= item "." | root item "."\nitem ::= [a-m][0-9] | "<" item ">"'
        ),
        min_tokens=MAX_TOKENS,
    ),
    "schema": SamplingParams(
        max_tokens=MAX_TOKENS,
        temperature=0,
        structured_outputs=StructuredOutputsParams(
            json={"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 20, "maxItems": 20}
        ),
    ),
}
for params in SAMPLING.values():
    if params.structured_outputs is not None:  # the ingress's input processor, which these do not pass, does so
        params.structured_outputs._backend = "xgrammar"


class Reader:
    """Collects what a link delivers, request by request."""

    def __init__(self, link: InstanceLink) -> None:
        self.link, self._batches = link, link.events()
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.pauses: list[Paused] = []

    async def until(self, request_ids: list[str]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not set(request_ids) <= set(self.finished):
            assert time.monotonic() < deadline_s, f"no end of {set(request_ids) - set(self.finished)}"
            self._take(await anext(self._batches))

    def _take(self, batch: object) -> None:
        if isinstance(batch, Paused):
            self.pauses.append(batch)
            return
        assert isinstance(batch, StepBatch)
        for output in batch.outputs.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.finished[output.request_id] = output.finish_reason


def make_request(request_id: str, prompt: list[int], sampling_params: SamplingParams) -> EngineCoreRequest:
    return sent_request(request_id, prompt, sampling_params.clone())


@pytest_asyncio.fixture(scope="module")
async def readers(instances: list[InstanceProcess]) -> AsyncIterator[list[Reader]]:
    links = [await InstanceLink.connect(i.endpoint, token=CHANNEL_TOKEN, client_id="test") for i in instances]
    yield [Reader(link) for link in links]
    for link in links:
        await link.close()


PROMPTS = [
    [random.Random(length).randrange(10, 500) for _ in range(length)]
    for length in (5, 31, 64, 150, 300)  # the longer ones are prefilled in several chunks
]


@pytest.mark.parametrize("kind", SAMPLING)
async def test_resumed_tokens_equal_undisturbed(readers: list[Reader], kind: str) -> None:
    home, away = readers
    names = [f"{kind}/{i}" for i in range(len(PROMPTS))]
    for name, prompt in zip(names, PROMPTS, strict=True):
        home.link.add(make_request(name, prompt, SAMPLING[kind]))
    await home.until(names)
    assert {home.finished[name] for name in names} <= {FinishReason.LENGTH, FinishReason.STOP}
    for cut in (1, 17, MAX_TOKENS - 1):
        resumed = [name for name in names if len(home.tokens[name]) > cut]
        assert resumed, "this kind of request ends too early to be cut"
        for name in resumed:
            request = make_request(f"{name}@{cut}", PROMPTS[names.index(name)], SAMPLING[kind])
            away.link.add(request, home.tokens[name][:cut])
        await away.until([f"{name}@{cut}" for name in resumed])
        for name in resumed:
            assert away.tokens[f"{name}@{cut}"] == home.tokens[name][cut:]
            assert away.finished[f"{name}@{cut}"] == home.finished[name]


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
