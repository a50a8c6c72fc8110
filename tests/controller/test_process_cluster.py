"""The controller with real engines as plain processes: it merges them, splits them, and follows what breaks."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pengserve.controller.events import EventLog
from pengserve.controller.loop import Controller
from pengserve.controller.process_port import ProcessPort
from pengserve.planners.types.config import ControllerConfig, InstanceConfig, MergeConfig
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.layout import Layout, parse_groups
from pengserve.planners.types.plans import LayoutTarget
from pengserve.planners.types.snapshot import InstanceState
from tests.controller.fakes import life
from tests.controller.test_loop import until
from tests.support.processes import CHANNEL_TOKEN, ENGINE, OFFLINE

pytestmark = pytest.mark.slow

START_S = 200.0
DEGREES = (2,)
CONFIG = ControllerConfig(
    app="test", num_instances=2, tick_s=0.1, restart_backoff_s=0.1, degrees=DEGREES, merge=MergeConfig(is_auto=False)
)


@asynccontextmanager
async def cluster(model: Path, directory: Path) -> AsyncIterator[tuple[Controller, ProcessPort]]:
    """Two instances under a controller; all of it ends with the block."""
    config = InstanceConfig(
        app="test", model=str(model), engine=ENGINE, channel_token=CHANNEL_TOKEN, degrees=DEGREES, peer_timeout_s=5
    )
    port = ProcessPort(config, python=sys.executable, environment=OFFLINE, directory=directory)
    controller = Controller(CONFIG, port, EventLog())
    loop = asyncio.get_running_loop().create_task(controller.run())
    try:
        yield controller, port
    finally:
        await controller.stop()
        await asyncio.wait_for(asyncio.gather(loop, return_exceptions=True), 30)
        await port.close()


def layout(controller: Controller) -> Layout:
    return controller.snapshot().layout


def logged(controller: Controller) -> str:
    """What happened, for the message of a failed test."""
    return "\n".join(f"{e.time_s:.2f} {e.kind} {e.span} {e.why} {dict(e.data)}" for e in controller.events(limit=999))


async def reached(controller: Controller, text: str, timeout_s: float = 160) -> None:
    """Waits until the layout is `text`, and every instance says so."""

    def is_there() -> bool:
        snapshot = controller.snapshot()
        wide = {member: str(g) for g in snapshot.layout.groups if len(g.members) > 1 for member in g.members}
        said = all(instance.lane == wide.get(instance.instance_id, "dp") for instance in snapshot.instances)
        return " ".join(map(str, snapshot.layout.groups)) == text and said

    try:
        await until(is_there, timeout_s)
    except TimeoutError:
        raise AssertionError(f"{layout(controller)} is not {text}:\n{logged(controller)}") from None


async def formable(controller: Controller, timeout_s: float) -> None:
    """Both instances are READY with lanes and communicators for the pair."""
    try:
        await until(lambda: controller._state is not None and len(controller.snapshot().groups) == 1, timeout_s)
    except TimeoutError:
        raise AssertionError(f"{controller.snapshot()}\n{logged(controller)}") from None


@pytest.mark.faults
async def test_real_engines_merge_split_and_survive_a_kill(model: Path, tmp_path: Path) -> None:
    async with cluster(model, tmp_path) as (controller, port):
        await formable(controller, START_S)
        for _ in range(3):
            controller.set_layout(LayoutTarget(groups=parse_groups("tp2@(0,1)")))
            await reached(controller, "tp2@(0,1)")
            controller.set_layout(LayoutTarget(groups=()))
            await reached(controller, "dp@(0) dp@(1)")
        events = controller.events(limit=999)
        assert [e.kind for e in events if e.span.startswith("switch:")] == [
            EventKind.TRANSITION_START,
            EventKind.TRANSITION_END,
        ] * 6, logged(controller)
        seconds = [e.data["commit_s"] for e in events if e.kind is EventKind.TRANSITION_END]
        assert max(seconds) < 5

        controller.set_layout(LayoutTarget(groups=parse_groups("tp2@(0,1)")))
        await reached(controller, "tp2@(0,1)")
        os.kill(port.pid(life(1)), signal.SIGKILL)
        await reached(controller, "dp@(0) dp@(1)", 5)
        survivor = controller.snapshot().instances[0]
        assert (survivor.key, survivor.state) == (life(0), InstanceState.READY)
        assert survivor.revision, "an instance numbers its answers"
        await formable(controller, START_S)
        await reached(controller, "tp2@(0,1)")
        assert controller.snapshot().instances[1].key == life(1, 2)
