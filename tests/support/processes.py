"""Real instances as plain processes: started with a time limit, found by id, and always ended."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pengserve.planners.types.codec import from_data, to_data
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.snapshot import InstanceSnapshot

START_TIMEOUT_S = 600.0
CHANNEL_TOKEN = "a-token-of-the-tests"
ENGINE: Mapping[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_batched_tokens": 128,  # prompts above this are prefilled in chunks
    "max_num_seqs": 16,
    "block_size": 32,
    "kv_cache_memory_bytes": 32 << 20,
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


@dataclass
class InstanceProcess:
    """One `python -m pengserve.replicas.host`, or another module that runs it."""

    config: InstanceConfig
    instance_id: int
    incarnation: int = 0
    module: str = "pengserve.replicas.host"
    process: subprocess.Popen[str] = field(init=False)
    snapshot: InstanceSnapshot = field(init=False)
    _files: tempfile.TemporaryDirectory[str] = field(init=False)

    def __post_init__(self) -> None:
        self._files = tempfile.TemporaryDirectory(prefix="pengserve-instance-")
        config_path = Path(self._files.name) / "config.json"
        config_path.write_text(json.dumps(to_data(self.config)))
        self._log = (Path(self._files.name) / "log").open("w")
        command = [sys.executable, "-m", self.module, "--config", str(config_path)]
        command += ["--instance-id", str(self.instance_id), "--incarnation", str(self.incarnation)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=os.environ | OFFLINE
        )

    @property
    def endpoint(self) -> str:
        """Where ingresses connect."""
        return self.snapshot.endpoint

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Blocks until the process has announced itself."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if readable else ""
        if not line:
            log = Path(self._log.name).read_text()
            self.kill()
            raise RuntimeError(f"instance {self.instance_id} did not start:\n{log[-4000:]}")
        self.snapshot = from_data(InstanceSnapshot, json.loads(line))

    def kill(self) -> None:
        """SIGKILL, as a fault would."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self._reap(10)

    def stop(self, timeout_s: float = 120.0) -> int:
        """SIGTERM: drains, then ends. Returns the exit status; its step loop must have come to its end."""
        self.process.terminate()
        with Path(self._log.name).open() as log:  # can be read after its folder is gone
            status = self._reap(timeout_s)
            written = log.read()
        assert "the step loop failed" not in written, written[-4000:]
        return status

    def _reap(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()
            self._log.close()
            self._files.cleanup()


def start_instances(
    model: Path,
    instance_ids: Sequence[int],
    *,
    incarnation: int = 0,
    engine: Mapping[str, Any] | None = None,
    module: str = "pengserve.replicas.host",
    **changes: Any,
) -> list[InstanceProcess]:
    """Starts instances side by side and waits until all are ready. `changes` are fields of their `InstanceConfig`."""
    config = InstanceConfig(
        app="tests", model=str(model), engine={**ENGINE, **(engine or {})}, channel_token=CHANNEL_TOKEN, **changes
    )
    deadline_s = time.monotonic() + START_TIMEOUT_S
    processes = [
        InstanceProcess(config=config, instance_id=i, incarnation=incarnation, module=module) for i in instance_ids
    ]
    try:
        for process in processes:
            process.wait_ready(deadline_s - time.monotonic())
    except BaseException:
        for process in processes:
            process.kill()
        raise
    return processes
