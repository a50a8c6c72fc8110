"""The feed: one look a second for all pages, none for no page; pages that come again miss nothing, slow ones go."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.cluster.ui import feed as module
from pengserve.cluster.ui.feed import MAX_BEHIND, MAX_CLIENTS, Feed, Watcher
from pengserve.cluster.ui.tap import TrafficTap
from pengserve.cluster.ui.view import apply_delta
from pengserve.planners.types.events import EventKind
from tests.support.simulated import SimulatedCluster

PERIOD_S = 0.01


class Meters:
    """The ingress's meters, as far as the tap knows them."""

    on_first_tokens: Any = None
    on_slo: Any = None


@pytest.fixture
def cluster() -> SimulatedCluster:
    """Three instances."""
    return SimulatedCluster(3)


@pytest.fixture
async def feed(cluster: SimulatedCluster) -> AsyncIterator[Feed]:
    """A feed that looks a hundred times a second."""
    feed = Feed(cluster, period_s=PERIOD_S)
    yield feed
    feed.close()


def read(watcher: Watcher) -> list[tuple[str, str, Any]]:
    """What a page has got and not read: (event, id, data) each."""
    found = []
    text = b"".join(watcher.waiting).decode()
    watcher.waiting.clear()
    for block in text.split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in block.splitlines())
        if "event" in lines:
            found.append((lines["event"], lines["id"], json.loads(lines["data"])))
    return found


async def until(what: Any) -> None:
    async with asyncio.timeout(10):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(PERIOD_S / 2)


async def test_nothing_is_asked_while_no_page_looks(cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 5 * PERIOD_S)
    meters = Meters()
    feed = Feed(cluster, TrafficTap(meters), period_s=PERIOD_S)
    await asyncio.sleep(5 * PERIOD_S)
    assert cluster.num_looks == 0 and feed.is_resting and meters.on_first_tokens is None
    page = feed.join()
    await until(lambda: cluster.num_looks > 2)
    assert meters.on_first_tokens is not None
    feed.leave(page)
    await until(lambda: feed.is_resting)
    looks = cluster.num_looks
    await asyncio.sleep(5 * PERIOD_S)
    assert cluster.num_looks == looks and meters.on_first_tokens is None
    page = feed.join()
    await until(lambda: cluster.num_looks > looks)
    feed.close()


async def test_all_pages_get_the_same_from_one_look(cluster: SimulatedCluster, feed: Feed) -> None:
    pages = [feed.join() for _ in range(5)]
    await until(lambda: cluster.num_looks >= 4)
    told = [read(page) for page in pages]
    assert cluster.num_looks <= 6
    assert told[0] and all(other == told[0] for other in told)


async def test_a_snapshot_and_its_deltas_are_the_newest_view(cluster: SimulatedCluster, feed: Feed) -> None:
    page = feed.join()
    await until(lambda: cluster.num_looks >= 6)
    first, *others = read(page)
    assert first[0] == "snapshot" and {kind for kind, _, _ in others} == {"delta"}
    view = {name: value for name, value in first[2].items() if name != "story"}
    for _, _, delta in others:
        view = apply_delta(view, delta)
    late = feed.join()
    await asyncio.sleep(0)
    newest = read(late)[0][2]
    assert view == {name: value for name, value in newest.items() if name != "story"}


async def test_a_page_that_comes_again_gets_what_it_missed_and_no_more(cluster: SimulatedCluster, feed: Feed) -> None:
    stays, leaves = feed.join(), feed.join()
    await until(lambda: cluster.num_looks >= 3)
    told, seen = read(stays), read(leaves)
    assert told == seen
    last_id = seen[-1][1]
    feed.leave(leaves)
    cluster.tell(EventKind.POLICY_CHANGED, is_auto=True)
    await until(lambda: cluster.num_looks >= 7)
    back = feed.join(last_id)
    missed = read(back)
    assert missed == read(stays)
    assert "snapshot" not in {kind for kind, _, _ in missed} and "decision" in {kind for kind, _, _ in missed}


async def test_a_page_that_missed_nothing_gets_nothing_at_once(cluster: SimulatedCluster) -> None:
    feed = Feed(cluster, period_s=1000.0)
    page = feed.join()
    await until(lambda: page.waiting and b"snapshot" in page.waiting[-1])
    last_id = read(page)[-1][1]
    assert read(feed.join(last_id)) == []
    feed.close()


@pytest.mark.parametrize("last_id", ["", "x", "0-1", "00000000-3", "a-b-c", "-", "é-1", "1-99999999999999999999999"])
async def test_a_page_of_another_feed_gets_everything(cluster: SimulatedCluster, feed: Feed, last_id: str) -> None:
    feed.join()
    await until(lambda: cluster.num_looks >= 3)
    assert [kind for kind, _, _ in read(feed.join(last_id))] == ["snapshot"]


async def test_what_was_kept_is_bounded_and_an_old_page_gets_everything(cluster: SimulatedCluster, feed: Feed) -> None:
    page = feed.join()
    await until(lambda: cluster.num_looks >= 2)
    last_id = read(page)[-1][1]
    await until(lambda: cluster.num_looks >= module.KEPT_MESSAGES + 4)
    assert [kind for kind, _, _ in read(feed.join(last_id))] == ["snapshot"]


async def test_a_page_that_does_not_read_is_let_go(cluster: SimulatedCluster, feed: Feed) -> None:
    slow, quick = feed.join(), feed.join()
    while not slow.dropped.is_set():
        quick.waiting.clear()
        await asyncio.sleep(PERIOD_S)
        assert len(slow.waiting) <= MAX_BEHIND
    assert not quick.dropped.is_set() and not slow.waiting


async def test_pages_are_bounded(feed: Feed) -> None:
    pages = [feed.join() for _ in range(MAX_CLIENTS)]
    with pytest.raises(RequestRefused, match="32 pages") as refused:
        feed.join()
    assert refused.value.status == 429 and refused.value.retry_after_s
    feed.leave(pages[0])
    feed.join()


async def test_decisions_come_by_name_and_once(cluster: SimulatedCluster, feed: Feed) -> None:
    cluster.tell(EventKind.PLAN_DECIDED, "before", action="merge", group="tp2@(0,1)")
    cluster.tell(EventKind.ROUTING_CHANGED)  # no part of the story
    page = feed.join()
    await until(lambda: cluster.num_looks >= 2)
    ((_, _, first), *_) = read(page)
    assert [event["why"] for event in first["story"]] == ["before"]
    cluster.tell(EventKind.PLAN_OUTCOME, "after", action="merge")
    await until(lambda: cluster.num_looks >= 6)
    assert [data["why"] for kind, _, data in read(page) if kind == "decision"] == ["after"]


async def test_a_new_controller_that_numbers_anew_repeats_nothing(cluster: SimulatedCluster, feed: Feed) -> None:
    cluster.tell(EventKind.POLICY_CHANGED, "kept")
    page = feed.join()
    await until(lambda: cluster.num_looks >= 2)
    feed._controller_s = 0.5  # as if another one had been known: the log is read from its beginning again
    cluster.tell(EventKind.POLICY_CHANGED, "new")
    await until(lambda: cluster.num_looks >= 6)
    told = [data["why"] for kind, _, data in read(page) if kind == "decision"]
    assert told == ["new"]


async def test_pages_are_told_that_the_controller_is_away_and_that_it_is_back(
    cluster: SimulatedCluster, feed: Feed
) -> None:
    page = feed.join()
    await until(lambda: cluster.num_looks >= 2)
    read(page)
    cluster.is_away = True
    await until(lambda: page.waiting)
    await asyncio.sleep(3 * PERIOD_S)
    assert read(page)[-1][2] == {"is_away": True}
    cluster.is_away = False
    looks = cluster.num_looks
    await until(lambda: cluster.num_looks >= looks + 2)
    assert any(data.get("is_away") is False for _, _, data in read(page))


def test_the_tap_tells_median_and_tail_of_what_came_since() -> None:
    meters = Meters()
    tap = TrafficTap(meters)
    tap.open()
    meters.on_first_tokens([0.1, 0.2, 0.3])
    told = {"first_tokens": 3, "ttft_p50_s": 0.2, "ttft_p99_s": pytest.approx(0.298), "classes": {}}
    assert tap.read() == told
    assert tap.read() == {"first_tokens": 0, "ttft_p50_s": None, "ttft_p99_s": None, "classes": {}}
    meters.on_first_tokens([0.5])
    assert tap.read()["ttft_p99_s"] == 0.5
    tap.close()
    assert meters.on_first_tokens is None


def test_the_tap_tells_what_was_kept_of_slos_by_class_within_bounds() -> None:
    meters = Meters()
    tap = TrafficTap(meters)
    tap.open()
    for n in range(1000):
        meters.on_slo("flex", n % 4 != 0)
    meters.on_slo("default", True)
    for n in range(10_000):
        meters.on_slo(f"class-{n}", False)
    classes = tap.read()["classes"]
    assert classes["flex"] == {"kept": 0.75, "answers": 200}
    assert classes["default"] == {"kept": 1.0, "answers": 1} and len(classes) == 16
    tap.close()
    assert meters.on_slo is None
