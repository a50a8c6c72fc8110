"""Prefixes over real instances: what dispatch predicts is what the instances find."""

import re
import time
import uuid

import httpx
import pytest

from pengserve.cluster.ingress.routing.prefixes import GRANULE

pytestmark = pytest.mark.slow

TURNS = 4


def totals(http: httpx.Client) -> tuple[float, float]:
    """Prompt tokens that were predicted, and that were found, over all instances."""
    text = http.get("/metrics").text
    names = ("predicted", "hit")
    found = [re.findall(rf"^pengserve_instance_prefix_{name}_tokens_total.* (\S+)$", text, re.M) for name in names]
    return tuple(sum(map(float, values)) for values in found)  # type: ignore[return-value]


def ask(http: httpx.Client, prompt: list[int]) -> list[int]:
    """A completion's tokens."""
    body = {"model": http.get("/v1/models").json()["data"][0]["id"], "prompt": prompt, "max_tokens": 8}
    answer = http.post("/v1/completions", json={**body, "return_token_ids": True, "temperature": 0})
    answer.raise_for_status()
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def test_the_turns_of_a_conversation_are_predicted_and_found(http: httpx.Client) -> None:
    predicted, found = totals(http)
    seed = uuid.uuid4().int
    prompt = [100 + (seed >> (i % 100)) % 300 for i in range(2 * GRANULE)]
    for turn in range(TURNS):
        prompt += ask(http, prompt)
        prompt += [100 + (seed >> (i + turn) % 100) % 350 for i in range(GRANULE)]
    time.sleep(1.5)  # heartbeats bring the last counts
    now_predicted, now_found = totals(http)
    assert now_predicted - predicted >= (TURNS - 1) * 2 * GRANULE
    # vLLM's blocks are smaller than granules, and are found a little further.
    assert now_found - found >= now_predicted - predicted
    assert now_found - found <= now_predicted - predicted + TURNS * GRANULE
