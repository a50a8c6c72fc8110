"""The port to plain processes, with children that have no engine."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pengserve.controller.process_port import ProcessPort
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.directory import PeerAddress, PeerDirectory
from pengserve.planners.types.errors import EngineError, FenceError, StepError
from pengserve.planners.types.ids import Epoch
from pengserve.planners.types.layout import Group
from pengserve.planners.types.plans import SwitchPlan
from tests.controller.fakes import FIRST, life

# What a host answers, without an instance behind it: `prepare` fails, `commit` says which plan it got, `drain` hangs.
CHILD = r"""
import json, sys
from pengserve.planners.types.codec import to_data
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchReport
from pengserve.planners.types.snapshot import InstanceSnapshot, InstanceState

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
key = InstanceKey(instance_id=int(arguments["--instance-id"]), incarnation=int(arguments["--incarnation"]))
said = []
for line in sys.stdin:
    call = json.loads(line)
    name, args, answer = call["call"], call["args"], {}
    if name == "status":
        lane = said[-1] if said else "dp"
        answer["result"] = to_data(InstanceSnapshot(key=key, state=InstanceState.READY, lane=lane))
    elif name == "connect":
        said.append(f"version {args['directory']['version']['counter']}")
        answer["result"] = None
    elif name == "prepare":
        answer["error"] = {"type": args["plan"]["why"], "message": "not now"}
    elif name == "commit":
        answer["result"] = to_data(SwitchReport(plan_id=args["plan"]["plan_id"], epoch=8, cutover_s=0.25))
    elif name == "abort":
        print("out of memory", file=sys.stderr)
        sys.exit(3)
    else:
        continue
    print(json.dumps({"id": call["id"], **answer}), flush=True)
"""
PLAN = SwitchPlan(
    plan_id="7:merge", epoch=Epoch(7), group=Group.parse("tp2@(0,1)"), members=(life(0), life(1)), is_merge=True
)


@asynccontextmanager
async def port(tmp_path: Path) -> AsyncIterator[ProcessPort]:
    """A port whose children run `CHILD`; all of them end with it."""
    config = InstanceConfig(app="test", model="none")
    port = ProcessPort(config, python=sys.executable, directory=tmp_path, command=("-c", CHILD))
    try:
        async with asyncio.timeout(30):
            yield port
    finally:
        await port.close()


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_calls_and_values_arrive(tmp_path: Path) -> None:
    async with port(tmp_path) as ports:
        await ports.create(life(0))
        assert (await ports.status(life(0))).key == life(0)
        peers = (PeerAddress(key=life(0), endpoint="127.0.0.1:1"),)
        await ports.connect(life(0), PeerDirectory(version=replace(FIRST, counter=9), peers=peers, groups=()))
        assert (await ports.status(life(0))).lane == "version 9"
        report = await ports.commit(life(0), PLAN)
        assert (report.plan_id, report.epoch, report.cutover_s) == ("7:merge", 8, 0.25)


def test_a_directory_that_is_missing_is_made(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there"
    ProcessPort(InstanceConfig(app="test", model="none"), python=sys.executable, directory=directory)
    assert (directory / "config.json").exists()


@pytest.mark.parametrize("kind", [StepError, FenceError, EngineError])
async def test_deliberate_errors_arrive_as_what_they_are(tmp_path: Path, kind: type[Exception]) -> None:
    async with port(tmp_path) as ports:
        await ports.create(life(0))
        plan = SwitchPlan(
            plan_id="x", epoch=PLAN.epoch, group=PLAN.group, members=PLAN.members, is_merge=True, why=kind.__name__
        )
        with pytest.raises(kind, match="not now") as caught:
            await ports.prepare(life(0), plan)
        assert type(caught.value) is kind


async def test_other_errors_do_not_say_that_the_instance_is_gone(tmp_path: Path) -> None:
    async with port(tmp_path) as ports:
        await ports.create(life(0))
        plan = SwitchPlan(
            plan_id="x", epoch=PLAN.epoch, group=PLAN.group, members=PLAN.members, is_merge=True, why="KeyError"
        )
        with pytest.raises(RuntimeError, match="KeyError: not now"):
            await ports.prepare(life(0), plan)


async def test_a_call_that_waits_holds_up_nobody_and_ends_with_its_process(tmp_path: Path) -> None:
    async with port(tmp_path) as ports:
        await ports.create(life(0))
        hanging = asyncio.get_running_loop().create_task(ports.drain(life(0), 60))
        await ports.status(life(0))
        assert not hanging.done()
        with pytest.raises(EngineError, match=r"exit status 3; out of memory"):
            await ports.abort(life(0), "x")
        with pytest.raises(EngineError):
            await hanging
        with pytest.raises(EngineError):
            await ports.status(life(0))
        assert (await ports.discover()).leftovers == (life(0),)
        await ports.kill(life(0))
        found = await ports.discover()
        assert (found.living, found.leftovers, found.newest) == ((), (), (life(0),))


async def test_kill_ends_that_child_alone(tmp_path: Path) -> None:
    async with port(tmp_path) as ports:
        for key in (life(0), life(1)):
            await ports.create(key)
        pids = [ports.pid(key) for key in (life(0), life(1))]
        await ports.kill(life(0))
        assert [exists(pid) for pid in pids] == [False, True]
        assert (await ports.discover()).living == (life(1),)
        assert (await ports.status(life(1))).key == life(1)
        await ports.kill(life(0))
