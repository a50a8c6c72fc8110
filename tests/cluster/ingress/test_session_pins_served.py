"""Pins over a real instance and its ingress: a session's KV outlives what would have pushed it out."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.ingress import MODEL_NAME, FixedRoutes, ingress_config, serving, wait_ready
from tests.support.processes import start_instances

pytestmark = pytest.mark.slow

BLOCK, NUM_BLOCKS, PIN_S = 32, 64, 8.0
TURN, OTHERS = 10 * BLOCK, 5  # tokens of a turn; the others need more blocks than there are
HEADER = "x-pengserve-session"


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """An instance of few blocks, whose sessions may pin."""
    [process] = start_instances(model, [0], engine={"kv_cache_memory_bytes": NUM_BLOCKS * 65_536}, session_pin_s=PIN_S)
    with serving(ingress_config([process]), FixedRoutes([process])) as found:
        wait_ready(found)
        yield found
    assert process.stop() == 0


def hits(url: str) -> float:
    """Prompt tokens that the prefix cache had, as the metrics say; they follow statistics that come twice a second."""
    time.sleep(1.5)
    text = httpx.get(f"{url}/metrics").text
    return sum(map(float, re.findall(r"^pengserve_instance_prefix_hit_tokens_total.* (\S+)$", text, re.M)))


def ask(url: str, first: int, num_tokens: int, session: str = "") -> None:
    """A prompt that begins as no other does."""
    prompt = [first, *(10 + (first * 7 + i) % 400 for i in range(num_tokens - 1))]
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    headers = {HEADER: session} if session else {}
    httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()


def found_again(url: str, number: int, session: str, pause_s: float = 0.0) -> float:
    """Tokens of a second turn that were found, after others have needed all blocks."""
    ask(url, number, TURN, session)
    time.sleep(pause_s)
    for other in range(OTHERS):
        ask(url, number + 1 + other, NUM_BLOCKS // 3 * BLOCK)
    before = hits(url)
    ask(url, number, TURN + BLOCK, session)
    return hits(url) - before


def test_a_session_finds_its_kv_again_and_others_do_not(url: str) -> None:
    assert found_again(url, 20, "") == 0
    assert found_again(url, 40, "a conversation") >= TURN - BLOCK


def test_a_pin_ends_with_its_time(url: str) -> None:
    assert found_again(url, 60, "another conversation", pause_s=PIN_S + 1.0) == 0
