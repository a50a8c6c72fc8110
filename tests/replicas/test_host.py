"""A process's controller always gets an answer, and what only a programmer can mend is in the log as well."""

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pengserve.controller.process_port import ProcessPort
from pengserve.planners.types.codec import to_data
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import StepError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.orders import KINDS, Migrate, Park, Place, Redirect, RequestOrder, Resume
from pengserve.planners.types.snapshot import InstanceState
from pengserve.replicas.host import ControlLines
from pengserve.replicas.instance import Instance
from pengserve.replicas.terms import TermFence
from pengserve.replicas.versions import versions
from tests.support.processes import InstanceProcess
from tests.support.waiting import until


def answer(error: Exception) -> dict[str, Any]:
    """What a controller hears when an instance's `status` raises this."""

    def status() -> None:
        raise error

    instance: Any = SimpleNamespace(status=status, terms=TermFence())
    answers = io.StringIO()
    lines = ControlLines(instance, answers, on_end=lambda: None)
    lines.serve(io.StringIO(json.dumps({"id": 7, "call": "status"}) + "\n"))
    lines._threads.shutdown()
    result: dict[str, Any] = json.loads(answers.getvalue())
    return result


def test_a_refusal_is_answered_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert answer(StepError("not now")) == {"id": 7, "error": {"type": "StepError", "message": "not now"}}
    assert caplog.records == []


def test_a_fault_is_answered_and_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert answer(KeyError("x"))["error"]["type"] == "KeyError"
    assert [record.exc_info is not None for record in caplog.records] == [True]


async def test_orders_of_all_kinds_arrive_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = InstanceKey(instance_id=InstanceId(0), incarnation=0)
    other = InstanceKey(instance_id=InstanceId(1), incarnation=2)
    orders = [
        Migrate(order_id="m", source=key, target=other, request_ids=("a", "b")),
        Redirect(order_id="r", source=key, target=other, max_tokens=64),
        Park(order_id="p", instance=key, request_ids=("a",)),
        Resume(order_id="q", instance=key, request_ids=("a",)),
        Place(order_id="l", instance=key, request_id="b", layers=(1, 3)),
    ]
    assert {type(order).__name__ for order in orders} == set(KINDS)
    arrived: list[RequestOrder] = []
    instance: Any = SimpleNamespace(order=arrived.extend, terms=TermFence())
    lines = ControlLines(instance, io.StringIO(), on_end=lambda: None)

    async def sent(key: InstanceKey, name: str, **args: Any) -> None:
        lines.serve(io.StringIO(json.dumps({"id": 1, "call": name, "args": to_data(args)}) + "\n"))
        lines._threads.shutdown()

    port = ProcessPort(InstanceConfig(app="a", model="none"), python=sys.executable, directory=tmp_path)
    monkeypatch.setattr(port, "_call", sent)
    await port.order(key, orders)
    assert arrived == orders


def test_a_process_starts_again_with_the_variables_that_it_needs_from_its_start() -> None:
    code = (
        "import os, sys; from pathlib import Path; from pengserve.replicas.host import begin_with;"
        "began = Path('/proc/self/environ').read_bytes();"
        "sys.stdout.write('.'); sys.stdout.flush();"
        "begin_with({'OMP_NUM_THREADS': '3'});"
        "print(b'OMP_NUM_THREADS=3' in began.split(bytes(1)), sys.argv[1])"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", code, "an argument"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == "..True an argument\n"


@pytest.mark.slow
def test_an_instance_of_its_own_world_has_one_thread_of_gloo(instances: list[InstanceProcess]) -> None:
    """Each wakes a hundred times a second, whatever the instance does; vLLM alone would make thirteen."""
    tasks = Path(f"/proc/{instances[0].process.pid}/task")
    names = [(task / "comm").read_text().strip() for task in tasks.iterdir()]
    assert names.count("gloo_tcp_loop") == 1


def test_a_node_with_other_versions_runs_no_instance(tmp_path: Path) -> None:
    config = InstanceConfig(app="a", model=str(tmp_path), versions="PengServe 9.9.9, vLLM 9.9.9")
    instance = Instance(config, InstanceKey(instance_id=InstanceId(0), incarnation=0))
    instance.start()
    until(lambda: instance.status().state is InstanceState.DEAD)
    assert f"this node has {versions()}, the application runs PengServe 9.9.9, vLLM 9.9.9" in instance.failure()
    instance.stop()
