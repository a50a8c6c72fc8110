"""(c) PengServe: `pengserve up`, as a user runs it."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.overhead.plan import SERVED_NAME, Plan
from benchmarks.overhead.processor_time import TAG
from benchmarks.overhead.systems.base import ServerProcess, free_port


class PengServeUp:
    """One application with all instances, behind HAProxy."""

    notes = "`pengserve up`: Ray Serve application, HAProxy, one ingress replica, one process per instance"

    def __init__(
        self,
        logs: Path,
        *,
        name: str = "pengserve",
        command: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        shares_memory: bool = False,
    ) -> None:
        """`command` is `pengserve` of another checkout; `settings` join the configuration.

        With `shares_memory` weights and KV share the memory that they have elsewhere apart from each other.
        """
        self.name, self._shares_memory = name, shares_memory
        self._logs, self._settings = logs, settings or {}
        self._command = command or Path(sys.executable).with_name("pengserve")
        self._server: ServerProcess | None = None

    def start(self, plan: Plan) -> list[str]:
        """Writes the configuration and runs the command; returns once every instance serves."""
        port = free_port()
        config = self._logs / f"{self.name}.yaml"
        config.parent.mkdir(parents=True, exist_ok=True)
        instances = {"count": plan.num_instances, "device": plan.device, "cpu_threads": 1}
        engine = dict(plan.engine)
        if self._shares_memory:
            kv_bytes = engine.pop("kv_cache_memory_bytes", 0)
            weight_bytes = sum(file.stat().st_size for file in plan.model.glob("*.safetensors"))
            instances["memory_bytes"] = weight_bytes + kv_bytes if kv_bytes else "auto"
        settings = {
            "app": self.name,
            "model": str(plan.model),
            "served_model_name": SERVED_NAME,
            "instances": instances,
            "shape": {"degrees": []},  # the same lanes and packed weights as the others
            "engine": engine,
            "http": {"port": port},
            **self._settings,
        }
        config.write_text(json.dumps(settings, indent=1), encoding="utf-8")  # JSON is YAML
        command = [str(self._command), "up", str(config)]
        self._server = ServerProcess(command, self._logs / f"{self.name}.log", {TAG: self.name})
        url = f"http://127.0.0.1:{port}"
        give_up_s = time.monotonic() + plan.start_timeout_s
        self._server.wait_ready(f"{url}/ready", give_up_s)
        self._server.wait_text(
            f"{url}/metrics", f'pengserve_links_up{{app="{self.name}"}} {plan.num_instances}.0', give_up_s
        )
        return [url]

    def stop(self) -> None:
        """Ctrl-C: drains and stops all of it."""
        if self._server is not None:
            self._server.stop()
            self._server = None
