"""A real instance tries a request alone: after what runs is proven, before what comes later."""

import time

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams

from pengserve.replicas.engine.link import InstanceLink, StepBatch, Trial
from pengserve.replicas.trial_gate import PROVEN_TOKENS
from tests.support.cut_requests import make_request
from tests.support.processes import CHANNEL_TOKEN, InstanceProcess

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7]
TIMEOUT_S = 240.0
LONG = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)


async def read_until(link: InstanceLink, request_id: str) -> list[tuple[str, int] | Trial]:
    """What `link` says until that request ends: a token as (request, tokens so far), and each `Trial`."""
    said: list[tuple[str, int] | Trial] = []
    num_tokens: dict[str, int] = {}
    deadline_s = time.monotonic() + TIMEOUT_S
    async for event in link.events():
        assert time.monotonic() < deadline_s, said[-3:]
        if isinstance(event, Trial):
            said.append(event)
            continue
        assert isinstance(event, StepBatch)
        for output in event.outputs.outputs:
            num_tokens[output.request_id] = num_tokens.get(output.request_id, 0) + len(output.new_token_ids)
            said.append((output.request_id, num_tokens[output.request_id]))
            if output.request_id == request_id and output.finish_reason is not None:
                return said
    raise AssertionError("the link never ends without an error")


async def test_a_suspect_is_tried_between_what_ran_and_what_comes_later(instances: list[InstanceProcess]) -> None:
    one = await InstanceLink.connect(instances[0].endpoint, token=CHANNEL_TOKEN, client_id="one")
    one.add(make_request("neighbour", PROMPT, LONG))
    one.add(make_request("suspect", PROMPT, LONG), is_tried_alone=True)
    one.add(make_request("later", PROMPT, LONG))
    said = await read_until(one, "later")
    begin = said.index(Trial("suspect", True))
    assert ("neighbour", PROVEN_TOKENS) in said[:begin]
    assert ("suspect", 1) not in said[:begin]
    first_later = said.index(("later", 1))
    assert ("suspect", PROVEN_TOKENS) in said[begin:first_later]
    assert not [event for event in said if isinstance(event, Trial) and not event.is_alone]
    await one.close()
