"""(a) vLLM's own OpenAI server, one per instance, without Ray."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.overhead.plan import SERVED_NAME, Plan
from benchmarks.overhead.systems.base import ServerProcess, free_port


class VllmServers:
    """As many independent servers as instances; the client spreads itself over them."""

    def __init__(self, logs: Path, *, in_engine_process: bool = False) -> None:
        """With `in_engine_process`, the variant that saves the worker process.

        On CPUs vLLM starts three processes per server (API server, engine core, worker), even where the executor `uni`
        is asked for, to set OpenMP's environment; engine core and worker poll each other's shared memory. The variant's
        environment variable switches that rule off, and OpenMP's environment is set by this benchmark anyway.
        """
        self.name = "vllm-uni" if in_engine_process else "vllm"
        self.notes = "vllm.entrypoints.openai.api_server, one per instance, access log off" + (
            "; the worker in the engine core's process (VLLM_ENABLE_V1_MULTIPROCESSING=0, executor uni)"
            if in_engine_process
            else "; as it comes: API server, engine core and worker are three processes on CPUs"
        )
        self._in_engine_process = in_engine_process
        self._logs = logs
        self._servers: list[ServerProcess] = []

    def start(self, plan: Plan) -> list[str]:
        """Starts all servers at once."""
        ports = [free_port() for _ in range(plan.num_instances)]
        for port in ports:
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(plan.model)]
            command += ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)]
            command += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
            for name, value in plan.engine.items():
                command += command_flag(name, value)
            environment = {}
            if self._in_engine_process:
                command += ["--distributed-executor-backend", "uni"]
                environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            log = self._logs / f"{self.name}-{len(self._servers)}.log"
            self._servers.append(ServerProcess(command, log, environment))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        give_up_s = time.monotonic() + plan.start_timeout_s
        for server, url in zip(self._servers, urls, strict=True):
            server.wait_ready(f"{url}/health", give_up_s)
        return urls

    @property
    def pids(self) -> list[int]:
        """Process ids of the servers, in the order of their URLs."""
        return [server.pid for server in self._servers]

    def stop(self) -> None:
        """Stops all servers."""
        for server in self._servers:
            server.stop()
        self._servers.clear()


def command_flag(name: str, value: Any) -> list[str]:
    """An engine argument as vLLM's command line takes it."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
