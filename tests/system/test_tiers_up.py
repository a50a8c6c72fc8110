"""`pengserve up` with a host tier: what it serves, and what `status`, `top` and the metrics say of it."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.application import Application
from tests.support.processes import ENGINE
from tests.support.streams import make_prompts

pytestmark = pytest.mark.slow

BLOCK_BYTES = 65_536  # of the tiny model's KV: 32 tokens
DEVICE_BLOCKS, HOST_BLOCKS = 24, 200
NUM_REQUESTS, MAX_TOKENS = 12, 60
PROMPTS = [prompt + prompt for prompt in make_prompts(NUM_REQUESTS, seed=2, longest=300)]


@pytest.fixture(scope="module")
def tiered(model: Path) -> Iterator[Application]:
    engine = {**ENGINE, "kv_cache_memory_bytes": DEVICE_BLOCKS * BLOCK_BYTES}
    running = Application(
        model, settings={"engine": engine, "memory": {"host_bytes": HOST_BLOCKS * BLOCK_BYTES, "link_bytes_per_s": 4e9}}
    )
    try:
        running.wait_ready()
        yield running
    finally:
        exit_code = running.stop()
    assert exit_code == 0, "Ctrl-C did not stop the application cleanly"


def answer(url: str, prompt: list[int]) -> list[int]:
    """Greedy tokens."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    found = httpx.post(f"{url}/v1/completions", json=body, timeout=240, trust_env=False)
    assert found.status_code == 200, found.text
    tokens: list[int] = found.json()["choices"][0]["token_ids"]
    return tokens


def command(application: Application, *words: str) -> str:
    """What the command line prints."""
    line = [sys.executable, "-m", "pengserve.cluster.cli.main", *words, "--url", application.url]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def metric(application: Application, name: str) -> float:
    """The sum over its labels."""
    text = httpx.get(f"{application.url}/metrics", timeout=10, trust_env=False).text
    return sum(s.value for family in text_string_to_metric_families(text) for s in family.samples if s.name == name)


def test_a_burst_of_several_times_the_device_answers_as_one_by_one(tiered: Application) -> None:
    alone = [answer(tiered.url, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(NUM_REQUESTS) as clients:
        together = list(clients.map(lambda prompt: answer(tiered.url, prompt), PROMPTS))
    assert together == alone
    assert metric(tiered, "pengserve_instance_preemptions_total") == 0, "what does not fit is parked"
    assert metric(tiered, "pengserve_instance_tier_bytes_total") > 0


def test_the_tier_is_seen_everywhere(tiered: Application) -> None:
    snapshot = tiered.wait_ready()
    for instance in snapshot.instances:
        assert (instance.stats.device_blocks, instance.stats.host_blocks) == (DEVICE_BLOCKS - 1, HOST_BLOCKS)
    assert f"{HOST_BLOCKS * 32:,}" in command(tiered, "status"), "tokens that the host tier holds"
    assert metric(tiered, "pengserve_instance_host_blocks") == 2 * HOST_BLOCKS
