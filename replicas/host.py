"""An instance as a plain process, without Ray: for tests, benchmarks and debugging.

    python -m pengserve.replicas.host --config CONFIG.json [--instance-id 0] [--incarnation 0] [--control]

CONFIG.json holds the fields of `InstanceConfig`. One JSON line on standard output says when it is ready, with its
endpoint. SIGTERM and SIGINT make it leave: its requests move, end, or are sent again elsewhere, and the process ends.

With --control a controller's calls come as JSON lines on standard input from the start on, and nothing is announced:

    {"id": 7, "term": 3, "call": "prepare", "args": {"plan": {...}}}
    {"id": 7, "result": null}    or    {"id": 7, "error": {"type": "StepError", "message": "..."}}

Answers come in any order. When standard input ends, the controller is gone, and the process ends at once.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from pengserve.planners.types.codec import from_data, to_data
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.directory import PeerDirectory
from pengserve.planners.types.errors import PengServeError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.orders import KINDS
from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.ending import LINGER_S
from pengserve.replicas.environment import process_environment
from pengserve.replicas.instance import Instance, require_ready
from pengserve.replicas.signal_flag import SignalFlag

logger = logging.getLogger(__name__)

_CALL_THREADS = 8  # a drain and a commit wait; status calls must pass them


class ControlLines:
    """A controller's calls on one instance, read from one file and answered on another."""

    def __init__(self, instance: Instance, answers: IO[str], on_end: Callable[[], None]) -> None:
        """
        Args:
            on_end: runs when the calls have ended, or one of them was "stop".
        """
        self._instance, self._answers, self._on_end = instance, answers, on_end
        self._writing = threading.Lock()
        self._threads = ThreadPoolExecutor(_CALL_THREADS, thread_name_prefix="control")

    def serve(self, lines: IO[str]) -> None:
        """Begins a call for each line; returns when there are no more."""
        try:
            for line in lines:
                call = json.loads(line)
                self._threads.submit(self._answer, call["id"], call["call"], call.get("term", 0), call.get("args", {}))
        finally:
            self._on_end()

    def _answer(self, number: int, name: str, term: int, args: Mapping[str, Any]) -> None:
        answer: dict[str, Any] = {"id": number}
        try:
            answer["result"] = to_data(self._call(name, term, args))
        except Exception as error:
            # The caller gets every error: it must not wait for an answer that never comes.
            # An unexpected error leaves its traceback in this log: the caller gets one sentence.
            if not isinstance(error, PengServeError):
                logger.exception("the call %s failed", name)
            answer["error"] = {"type": type(error).__name__, "message": str(error)}
        with self._writing:
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()
        if name == "stop":
            self._on_end()

    def _call(self, name: str, term: int, args: Mapping[str, Any]) -> Any:
        if name == "status":
            self._instance.terms.hear(term)
            return self._instance.status()
        self._instance.terms.require(term)
        if name == "drain":
            return self._instance.drain(float(args["timeout_s"]))
        if name == "retire":
            return self._instance.retire(float(args["timeout_s"]))
        if name == "connect":
            return self._instance.connect(from_data(PeerDirectory, args["directory"]))
        if name == "prepare":
            return self._instance.prepare(from_data(SwitchPlan, args["plan"]))
        if name == "commit":
            return self._instance.commit(from_data(SwitchPlan, args["plan"]))
        if name == "abort":
            return self._instance.abort(str(args["plan_id"]))
        if name == "order":
            return self._instance.order([from_data(KINDS[one["kind"]], one["order"]) for one in args["orders"]])
        if name == "check":
            return self._instance.check()
        if name == "stop":
            return None
        raise ValueError(f"there is no call {name!r}")


def begin_with(environment: Mapping[str, str]) -> None:
    """Starts this process again, as itself, unless it began with these variables.

    OpenMP may read its own before Python runs: vLLM preloads it in the processes that its children inherit from. Two
    threads of each instance would then spin for the same cores.
    """
    if any(os.environ.get(name) != value for name, value in environment.items()):
        os.environ.update(environment)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main() -> int:
    """Runs one instance until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="JSON file with the fields of InstanceConfig")
    parser.add_argument("--instance-id", type=int, default=0)
    parser.add_argument("--incarnation", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="take a controller's calls on standard input")
    arguments = parser.parse_args()
    config = from_data(InstanceConfig, json.loads(arguments.config.read_text()))
    begin_with(process_environment(config))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    # vLLM logs to standard output, which here carries one line for the parent process.
    announcement = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    key = InstanceKey(instance_id=InstanceId(arguments.instance_id), incarnation=arguments.incarnation)
    instance = Instance(config, key)
    ended, told = SignalFlag(), SignalFlag()

    def leave(*_: object) -> None:
        told.set()
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    instance.start()
    try:
        if arguments.control:
            lines = ControlLines(instance, announcement, on_end=ended.set)
            # A daemon: a read of standard input cannot be interrupted when a signal ends the process.
            threading.Thread(target=lines.serve, args=(sys.stdin,), name="control lines", daemon=True).start()
        else:
            require_ready(instance, timeout_s=600)
            announcement.write(json.dumps(to_data(instance.status())) + "\n")
            announcement.flush()
        ended.wait()
        if told.is_set():
            instance.leave(config.drain_timeout_s)
            if arguments.control:
                time.sleep(LINGER_S)
    except PengServeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        instance.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
