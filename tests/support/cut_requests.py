"""Requests of every kind of sampling, and who reads what instances make of them: for laws of requests that are cut."""

import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from pengserve.replicas.engine.link import InstanceLink, Paused, StepBatch
from pengserve.replicas.engine.vllm_seam import EngineCoreRequest, FinishReason
from tests.support.processes import CHANNEL_TOKEN, InstanceProcess
from tests.support.vllm_requests import sent_request

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
        """Reads until these requests have ended."""
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


@asynccontextmanager
async def reading(instances: Sequence[InstanceProcess]) -> AsyncIterator[list[Reader]]:
    """Readers of links to these instances, which are closed at the end of the block."""
    links = [await InstanceLink.connect(i.endpoint, token=CHANNEL_TOKEN, client_id="test") for i in instances]
    yield [Reader(link) for link in links]
    for link in links:
        await link.close()


def make_request(request_id: str, prompt: list[int], sampling_params: SamplingParams) -> EngineCoreRequest:
    """As an ingress sends it."""
    return sent_request(request_id, prompt, sampling_params.clone())


PROMPTS = [
    [random.Random(length).randrange(10, 500) for _ in range(length)]
    for length in (5, 31, 64, 150, 300)  # the longer ones are prefilled in several chunks
]


async def check_cuts(home: Reader, away: Reader, kind: str, cuts: tuple[int, ...]) -> None:
    """Requests of this kind that `home` has ended go on at `away` from any of these cuts, as they went on at home."""
    names = [f"{kind}/{i}" for i in range(len(PROMPTS))]
    for name, prompt in zip(names, PROMPTS, strict=True):
        home.link.add(make_request(name, prompt, SAMPLING[kind]))
    await home.until(names)
    assert {home.finished[name] for name in names} <= {FinishReason.LENGTH, FinishReason.STOP}
    for cut in cuts:
        resumed = [name for name in names if len(home.tokens[name]) > cut]
        assert resumed, "this kind of request ends too early to be cut"
        for name in resumed:
            request = make_request(f"{name}@{cut}", PROMPTS[names.index(name)], SAMPLING[kind])
            away.link.add(request, home.tokens[name][:cut])
        await away.until([f"{name}@{cut}" for name in resumed])
        for name in resumed:
            assert away.tokens[f"{name}@{cut}"] == home.tokens[name][cut:]
            assert away.finished[f"{name}@{cut}"] == home.finished[name]
