"""(b) ray.serve.llm, in a virtual environment of its own: it needs pyarrow and pandas on top of the lock."""

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.overhead.plan import SERVED_NAME, Plan
from benchmarks.overhead.systems.base import ServerProcess, free_port

ENVIRONMENT_FOLDER = ROOT / ".venv-bench-ray-llm"
EXTRA_PACKAGES = ("pyarrow", "pandas")


class RayLlm:
    """One `build_openai_app` application with as many replicas as instances, behind Serve's proxy as it comes."""

    name = "ray-llm"
    notes = (
        "ray.serve.llm build_openai_app, Serve's own proxy, token batching at its default (50 ms); on CPUs it always "
        "starts the engine with the executor `mp`, which adds a worker process per instance"
    )

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._server: ServerProcess | None = None

    def start(self, plan: Plan) -> list[str]:
        """Makes the environment on first use, then starts Ray and the application in it."""
        python = make_environment()
        port = free_port()
        arguments = {
            "model": str(plan.model),
            "served_name": SERVED_NAME,
            "num_replicas": plan.num_instances,
            "port": port,
            "engine": dict(plan.engine),
        }
        script = Path(__file__).with_name("ray_llm_server.py")
        self._server = ServerProcess([str(python), str(script), json.dumps(arguments)], self._logs / "ray-llm.log")
        url = f"http://127.0.0.1:{port}"
        self._server.wait_ready(f"{url}/v1/models", time.monotonic() + plan.start_timeout_s)
        return [url]

    def stop(self) -> None:
        """Stops the application and its Ray."""
        if self._server is not None:
            self._server.stop()
            self._server = None


def make_environment() -> Path:
    """Python of the environment; made from the lock on first use, which takes some minutes."""
    python = ENVIRONMENT_FOLDER / "bin" / "python"
    ready = ENVIRONMENT_FOLDER / ".ready"
    if ready.exists():
        return python
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(ENVIRONMENT_FOLDER)],
        [sys.executable, str(ROOT / "deploy" / "install.py"), str(python), str(ROOT / "requirements-cpu.txt")],
        [*pip, *EXTRA_PACKAGES],
    ):
        subprocess.run(command, check=True, timeout=1800)
    ready.touch()
    return python
