"""The live page through Ray Serve and HAProxy, as `pengserve up` starts it."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.application import Application

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

STOPS_WITHIN_S = 30.0  # with an open page; far below the minute that running answers may take


@pytest.fixture(scope="module")
def own(model: Path) -> Iterator[Application]:
    """An application of this file, which the last test stops."""
    application = Application(model)
    try:
        application.wait_ready()
        yield application
    finally:
        if application.process.poll() is None:
            application.stop()


def events(answer: httpx.Response, count: int) -> list[tuple[float, dict[str, str]]]:
    """The next events of a stream, each with when it came."""
    found: list[tuple[float, dict[str, str]]] = []
    lines: dict[str, str] = {}
    for line in answer.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            lines[name] = value
            continue
        if "event" in lines:
            found.append((time.monotonic(), lines))
        lines = {}
        if len(found) == count:
            return found
    return found


def test_the_stream_comes_unbuffered_and_resumes(own: Application) -> None:
    with httpx.Client(base_url=own.url, timeout=30, trust_env=False) as http:
        with http.stream("GET", "/cluster/stream") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
            first = events(answer, 4)
        assert [lines["event"] for _, lines in first] == ["snapshot", "delta", "delta", "delta"]
        gaps_s = [later - sooner for (sooner, _), (later, _) in itertools.pairwise(first[1:])]
        assert all(0.3 < gap_s < 8 for gap_s in gaps_s), gaps_s  # one by one, a second apart
        with http.stream("GET", "/cluster/stream", headers={"Last-Event-ID": first[-1][1]["id"]}) as answer:
            assert events(answer, 1)[0][1]["event"] == "delta"
        assert 'id="map"' in http.get("/ui").text
        assert http.get("/ui/page.js").headers["content-type"].startswith("text/javascript")
    assert f"{own.url}/ui" in own.log()


def test_an_open_page_does_not_hold_up_the_end(own: Application) -> None:
    is_open, ends = threading.Event(), threading.Event()

    def watch() -> None:
        while not ends.is_set():  # as a browser does: it comes again and again
            try:
                with httpx.stream("GET", f"{own.url}/cluster/stream", timeout=30, trust_env=False) as answer:
                    for _ in answer.iter_lines():
                        is_open.set()
            except httpx.HTTPError:
                time.sleep(0.5)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    assert is_open.wait(30)
    started_s = time.monotonic()
    assert own.stop() == 0
    took_s = time.monotonic() - started_s
    ends.set()
    watcher.join(40)
    print(f"\n  stopped after {took_s:.1f} s")
    assert took_s < STOPS_WITHIN_S
