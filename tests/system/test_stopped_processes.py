"""Law: any process of an application may stand still for a while (SIGSTOP); no stream fails, and all goes on after it.

A process that stands still keeps its connections and its memory, and wakes into a world that may have replaced it.
"""

import asyncio
import contextlib
import os
import signal

import pytest

from tests.support.application import Application, ready
from tests.support.streams import make_prompts, stream_all
from tests.system.test_faults import assert_equal, undisturbed_streams

pytestmark = [pytest.mark.slow, pytest.mark.faults]

NUM_STREAMS = 8
MAX_TOKENS = 700
SHORT_S = 3.0  # less than anything waits for a sign of life
LONG_S = 15.0  # an instance that says nothing for 10 s counts as lost

STOPS = {
    "HAProxy": ("haproxy -", SHORT_S),
    "ingress": ("ray::ServeReplica", SHORT_S),
    "Serve's controller": ("ray::ServeController", LONG_S),
    "controller": ("ray::ControllerActor", LONG_S),
    "instance, shortly": ("ray::InstanceActor", SHORT_S),
    "instance, until it is replaced": ("ray::InstanceActor", LONG_S),
    "Ray's node manager": ("raylet/raylet", SHORT_S),
    "Ray's store": ("gcs_server", SHORT_S),
}


@pytest.mark.parametrize("name", STOPS)
async def test_a_process_that_stands_still_costs_no_stream(application: Application, name: str) -> None:
    title, seconds = STOPS[name]
    prompts = make_prompts(NUM_STREAMS, seed=4)
    application.wait_ready()
    expected = await undisturbed_streams(application, prompts, MAX_TOKENS)
    running = asyncio.create_task(stream_all(application.url, application.model_name, prompts, MAX_TOKENS))
    await asyncio.sleep(0.5)
    found = application.pids_of(title)
    assert found, f"no process is called {title!r}"
    os.kill(found[0], signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):  # its successor may have replaced it
            os.kill(found[0], signal.SIGCONT)
    assert_equal(await running, expected)
    after = await asyncio.to_thread(application.wait_ready)
    assert len(ready(after)) == 2
    again = await stream_all(application.url, application.model_name, prompts, MAX_TOKENS)
    assert_equal(again, expected)
