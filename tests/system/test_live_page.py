"""The live page over a real cluster: a browser watches a merge, a drop, a death and a replacement.

What the page says is compared with `/cluster/status`. `LIVE_PAGE_PICTURES=docs/images` keeps what it looked like.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pengserve.cluster.memory_parts import leader_of, memory_parts
from pengserve.cluster.ui.feed import Feed
from pengserve.planners.types.codec import from_data
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceState
from tests.support.browser import CHROMIUM, Page, browser
from tests.support.elastic import ControllerSource, ElasticCluster, elastic_cluster
from tests.support.ingress import MODEL_NAME
from tests.support.speed import least_cpu_s, slowness
from tests.support.streams import make_prompts
from tests.support.traffic import Traffic

pytestmark = [
    pytest.mark.slow,
    pytest.mark.shapes,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)"),
]

MEMORY_BYTES = 7 << 20  # of an instance: 3 MiB of weights, 4 MiB of KV
WITHIN_S = 240.0
BUSY = "Number(document.querySelector('#sum-running').textContent) >= 2"
PROMPT = "marmalade seven thousand"


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[ElasticCluster]:
    """Two instances that can merge and drop."""
    with elastic_cluster(model, 2, degrees=(2,), max_stages=2, memory_bytes=MEMORY_BYTES) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def url(cluster: ElasticCluster) -> Iterator[str]:
    """URL of an ingress."""
    with cluster.ingress() as url:
        yield url


@pytest.fixture
def page(url: str) -> Iterator[Page]:
    """A browser that watches."""
    with browser(height=760) as page:
        page.open(f"{url}/ui")
        page.wait("document.querySelector('#live').dataset.state === 'live'")
        yield page
        assert page.faults() == []
        page.open("about:blank")


def told(page: Page) -> dict[str, dict[str, str]]:
    """Of each instance what the page's cards say, and the group that they stand in."""
    script = """Object.fromEntries([...document.querySelectorAll('.card')].map((c) => [c.dataset.id, {
        ...Object.fromEntries([...c.querySelectorAll('[data-field]')].map((e) => [e.dataset.field, e.textContent])),
        state: c.dataset.state, group: c.closest('.raft').dataset.group,
        weightsShare: parseFloat(c.querySelector('.bar .weights').style.width) / 100,
        usedShare: parseFloat(c.querySelector('.bar .kv').style.width) / 100}]))"""
    found: dict[str, dict[str, str]] = page.run(script)
    return found


def is_as_told(snapshot: ClusterSnapshot, cards: dict[str, Any]) -> str:
    """What the page says otherwise than the cluster's status; empty where they agree."""
    for instance in snapshot.instances:
        group = snapshot.layout.group_of(instance.instance_id)
        assert group is not None
        card = cards.get(str(instance.instance_id))
        if card is None or (card["state"], card["group"]) != (instance.state.value, str(group)):
            return f"{instance.instance_id}: {card}, and it is {instance.state.value} in {group}"
        if instance.state is not InstanceState.READY:
            continue
        if (card["running"], card["waiting"]) != (str(instance.stats.num_running), str(instance.stats.num_waiting)):
            return f"{instance.instance_id}: {card}, and {instance.stats.num_running} run"
        weights, kv, used = memory_parts(instance, leader_of(snapshot.instances, instance, group))
        shares = (weights / (weights + kv), used / (weights + kv))
        if any(
            abs(said - is_) > 0.002 for said, is_ in zip((card["weightsShare"], card["usedShare"]), shares, strict=True)
        ):
            return f"{instance.instance_id}: bars {card}, and it has {weights}, {kv}, {used}"
    return ""


def require_agreement(page: Page, url: str) -> ClusterSnapshot:
    """Waits until page and status agree: the page is a second behind."""
    deadline_s = time.monotonic() + 30
    while True:
        data = httpx.get(f"{url}/cluster/status", trust_env=False).json()
        snapshot = from_data(ClusterSnapshot, data)
        difference = is_as_told(snapshot, told(page))
        if not difference:
            return snapshot
        assert time.monotonic() < deadline_s, difference
        time.sleep(0.1)


def headline(page: Page, *words: str) -> None:
    said = " && ".join(f"document.querySelector('#headline').textContent.includes({word!r})" for word in words)
    page.wait(said, WITHIN_S)


def picture(page: Page, name: str) -> None:
    """Photographs the page once cards stand still."""
    folder = os.environ.get("LIVE_PAGE_PICTURES")
    page.wait(
        "!document.getAnimations().some((a) => a.playState === 'running' && a.effect.getTiming().iterations === 1)"
    )
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(folder or temporary) / f"{name}.png"
        page.photograph(path)
        assert path.stat().st_size > 10_000


def test_a_browser_watches_a_merge_a_drop_a_death_and_a_replacement(
    cluster: ElasticCluster, url: str, page: Page
) -> None:
    prompts = make_prompts(8, seed=3, longest=60)
    headline(page, "2 instances serve alone")
    require_agreement(page, url)
    with Traffic(url) as traffic:

        def load(count: int, max_tokens: int) -> list[Any]:
            return [traffic.start(prompt=prompt, max_tokens=max_tokens) for prompt in prompts[:count]]

        body: dict[str, Any] = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 4}
        body["slo"] = {"ttft_ms": 60_000}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).status_code == 200
        page.wait("!document.querySelector('#attainment').hidden")
        assert page.text("#sum-slo") == "100 %" and page.text("#sum-classes") == "default"
        running = load(8, 300)
        page.wait(BUSY, WITHIN_S)
        picture(page, "live-page-alone")

        cluster.set_layout("tp2")
        headline(page, "0 and 1 serve as one, tp2")
        merged = require_agreement(page, url)
        assert page.text("#story .item .what").startswith("0 and 1 became one group, tp2")
        assert "An operator keeps it at tp2@(0,1)" in page.text("#subline")
        running += load(8, 300)
        page.wait(BUSY, WITHIN_S)
        picture(page, "live-page-merged")
        cluster.set_layout("dp")
        headline(page, "serve alone")

        running += load(8, 300)
        cluster.set_layout("pp2")
        headline(page, "0 and 1 serve as one, pp2")
        page.wait_for(lambda: all(card["weightsShare"] < 0.35 for card in told(page).values()), "half of the weights")
        dropped = require_agreement(page, url)
        assert dropped.epoch > merged.epoch
        running += load(8, 400)
        page.wait(BUSY, WITHIN_S)
        picture(page, "live-page-dropped")

        lost = cluster.key(1)
        os.kill(cluster.pid(1), signal.SIGKILL)
        page.wait("document.querySelector(\"[data-id='1']\").dataset.state !== 'ready'", WITHIN_S)
        page.wait("document.querySelector('#story').innerText.includes('Instance 1 died; it is replaced')", WITHIN_S)
        picture(page, "live-page-died")
        for stream in running:
            assert not stream.result(WITHIN_S).error
        page.wait("document.querySelector('#story').innerText.includes('Instance 1 is ready')", WITHIN_S)
        replaced = require_agreement(page, url)
        assert replaced.instances[1].key != lost
    assert {event.kind for event in cluster.events()} >= {EventKind.INSTANCE_LOST, EventKind.TRANSITION_END}
    assert PROMPT not in page.run("document.documentElement.outerHTML")
    frames = [m for m in page.messages if m["method"] == "Network.eventSourceMessageReceived"]
    assert len(frames) > 10 and PROMPT not in str(frames)


def test_a_stream_costs_the_ingress_less_than_a_hundredth(cluster: ElasticCluster, url: str) -> None:
    """Processor time of one look for one page, over the second until the next."""
    feed = Feed(ControllerSource(cluster))
    loop = asyncio.new_event_loop()
    try:
        cost_s = least_cpu_s(lambda: loop.run_until_complete(feed._look()), 20)
    finally:
        loop.close()
    print(f"\n  a look costs {cost_s * 1e3:.2f} ms")
    assert cost_s < 0.01 * slowness()
