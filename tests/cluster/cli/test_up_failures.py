"""What only a start can find reaches the terminal with its cause, and the command ends. Real starts."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from pengserve.cluster.cli import up
from pengserve.cluster.cli.progress import Steps
from pengserve.cluster.cli.ray_local import last_error
from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.layout import Layout
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot, InstanceState
from tests.support.application import free_port
from tests.support.processes import ENGINE, OFFLINE

TIMEOUT_S = 280.0


def _ends(tmp_path: Path, model: Path, engine: dict[str, object]) -> str:
    """The last line that `pengserve up` prints; it ends by itself, with exit code 1."""
    config = {
        "model": str(model),
        "instances": {"count": 1, "device": "cpu"},
        "engine": {**ENGINE, **engine},
        "http": {"port": free_port()},
        "controller": {"restart_backoff_s": 0.1, "restart_backoff_max_s": 0.5},
    }
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "pengserve.cluster.cli.main", "up", str(path)],
        env=os.environ | OFFLINE,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.shapes
def test_an_argument_that_the_model_forbids_is_told_with_its_cause(tmp_path, model):
    line = _ends(tmp_path, model, {"max_model_len": 1 << 20})
    assert "did not start" in line and "engine: User-specified max_model_len (1048576) is greater" in line


@pytest.mark.slow
@pytest.mark.shapes
def test_broken_weights_are_told_with_their_cause(tmp_path, model):
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    for weights in broken.glob("*.safetensors"):
        weights.write_bytes(b"0" * 64)
    line = _ends(tmp_path, broken, {})
    assert "instance 0 does not start" in line and "SafetensorError" in line


def _snapshot(*states: InstanceState) -> ClusterSnapshot:
    instances = tuple(
        InstanceSnapshot(key=InstanceKey(instance_id=InstanceId(number), incarnation=1), state=state)
        for number, state in enumerate(states)
    )
    return ClusterSnapshot(app="a", time_s=1.0, layout=Layout(epoch=Epoch(0), groups=()), instances=instances)


@pytest.mark.parametrize(
    ("states", "failures", "is_given_up"),
    [
        ("ds", {"0": ["weights"]}, False),
        ("dd", {"0": ["weights"], "1": ["weights"]}, True),
        ("dd", {"0": ["weights"], "1": ["memory"]}, False),
        ("ds", {"0": ["a", "b"]}, False),
        ("ds", {"0": ["a", "b", "c"]}, True),
        ("dr", {"0": ["weights", "weights"]}, False),
    ],
)
def test_starts_that_fail_alike_are_given_up_unless_one_instance_is_ready(states, failures, is_given_up):
    named = {"d": InstanceState.DEAD, "s": InstanceState.STARTING, "r": InstanceState.READY}
    snapshot = _snapshot(*(named[state] for state in states))
    steps = Steps(Console(file=io.StringIO()))
    if is_given_up:
        with pytest.raises(EngineError, match=failures["0"][-1]):
            up._show_instances(snapshot, failures, steps)
    else:
        up._show_instances(snapshot, failures, steps)


def test_the_error_in_a_remote_traceback_is_its_last_line():
    text = "The deployment failed to start 3 times in a row.\nTraceback:\n  File ...\nValueError: no such parser\n\n"
    assert last_error(text) == "ValueError: no such parser"
    assert last_error("") == ""
