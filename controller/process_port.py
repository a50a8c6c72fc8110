"""Instances as child processes of this one, without Ray: for tests, benchmarks and debugging.

Each child runs a given command, speaks JSON lines on its standard input and output (`replicas/host.py --control`), and
ends when its input does. Children do not outlive the process that holds the port; a controller that comes after another
one on the same port adopts them, as it would actors.
"""

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pengserve.controller.ports import Discovery, StatusCall
from pengserve.controller.terms import LocalTermStore, Term
from pengserve.planners.types import errors
from pengserve.planners.types.codec import from_data, to_data
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.directory import PeerDirectory
from pengserve.planners.types.errors import EngineError, PengServeError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.orders import RequestOrder
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import InstanceSnapshot

logger = logging.getLogger(__name__)

HOST_COMMAND = ("-m", "pengserve.replicas.host")  # after the Python interpreter
_LINE_BYTES = 16 << 20  # of an answer; a snapshot is a few KiB
_LOG_TAIL_BYTES = 2000
_KILL_TIMEOUT_S = 10.0


@dataclass
class _Child:
    """One process, and the calls that wait for its answer."""

    process: asyncio.subprocess.Process
    log_path: Path
    calls: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    next_id: int = 0
    reader: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None and self.reader is not None and not self.reader.done()


class ProcessPort:
    """`ReplicaPort` over child processes. All methods run on one event loop.

    Logs of the children are files `{instance id}.{incarnation}.log` in `directory`.
    """

    def __init__(
        self,
        config: InstanceConfig,
        *,
        python: str,
        environment: Mapping[str, str] | None = None,
        environment_of: Callable[[InstanceKey], Mapping[str, str]] | None = None,
        directory: Path | None = None,
        term: Term | None = None,
        command: Sequence[str] = HOST_COMMAND,
    ) -> None:
        """
        Args:
            config: of every instance.
            python: the interpreter to run, usually `sys.executable`.
            environment: variables on top of this process's own.
            environment_of: variables of one life, on top of those.
            directory: for configuration and logs, made where it is missing; a temporary one where it is None.
            term: of the controller that uses this port, sent with every call.
        """
        self._temporary = None if directory else tempfile.TemporaryDirectory(prefix="pengserve-instances-")
        self.directory = directory or Path(self._temporary.name if self._temporary else "")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._term = term or Term(LocalTermStore())
        self._command = [python, *command]
        self._environment = os.environ | dict(environment or {})
        self._environment_of = environment_of or (lambda key: {})
        self._children: dict[InstanceKey, _Child] = {}
        self._newest: set[InstanceKey] = set()
        self._config_path = self.directory / "config.json"
        self._config_path.write_text(json.dumps(to_data(config)))
        self._config_path.chmod(0o600)  # it holds the channel's secret

    def pid(self, key: InstanceKey) -> int:
        """Process id of a life, for tests that send signals."""
        return self._children[key].process.pid

    def log(self, key: InstanceKey) -> str:
        """The end of what a life wrote."""
        return _tail(self.directory / f"{key}.log")

    async def create(self, key: InstanceKey) -> None:
        """Starts the instance's process, once. Raises EngineError where it cannot start."""
        if key in self._children:
            return
        self._newest.add(key)
        log_path = self.directory / f"{key}.log"
        arguments = ["--config", str(self._config_path), "--instance-id", str(key.instance_id)]
        arguments += ["--incarnation", str(key.incarnation), "--control"]
        try:
            with log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    *arguments,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env=self._environment | dict(self._environment_of(key)),
                    limit=_LINE_BYTES,
                )
        except OSError as error:
            raise EngineError(f"cannot start {self._command[0]}: {error}; name an interpreter that exists") from error
        child = _Child(process=process, log_path=log_path)
        child.reader = asyncio.get_running_loop().create_task(_read(child), name=f"answers of {key}")
        self._children[key] = child

    async def status(self, key: InstanceKey) -> InstanceSnapshot:
        """The instance's own view of itself. Raises EngineError where its process has ended."""
        return from_data(InstanceSnapshot, await self._call(key, "status"))

    def statuses(self, keys: Sequence[InstanceKey]) -> list[StatusCall]:
        """One call for each of `keys`, not begun yet: every process answers in its own time."""
        return [self.status(key) for key in keys]

    async def drain(self, key: InstanceKey, timeout_s: float) -> bool:
        """Lets running requests finish within `timeout_s`; True once the instance runs none. Raises EngineError."""
        return bool(await self._call(key, "drain", timeout_s=timeout_s))

    async def retire(self, key: InstanceKey, timeout_s: float) -> bool:
        """Waits until the instance's ingresses have left; True once it runs nothing. Raises EngineError."""
        return bool(await self._call(key, "retire", timeout_s=timeout_s))

    async def connect(self, key: InstanceKey, directory: PeerDirectory) -> None:
        """Sends the instance the directory of its peers, and does not wait for groups. Raises EngineError."""
        await self._call(key, "connect", directory=directory)

    async def prepare(self, key: InstanceKey, plan: SwitchPlan) -> None:
        """Asks a member whether it can take part in `plan`. Raises StepError where it cannot, or EngineError."""
        await self._call(key, "prepare", plan=plan)

    async def commit(self, key: InstanceKey, plan: SwitchPlan) -> SwitchReport:
        """Asks the leader to carry out a prepared plan. Raises StepError where nothing was changed, or EngineError."""
        return from_data(SwitchReport, await self._call(key, "commit", plan=plan))

    async def abort(self, key: InstanceKey, plan_id: str) -> None:
        """Tells a member to forget a prepared plan; harmless where it has none."""
        await self._call(key, "abort", plan_id=plan_id)

    async def order(self, key: InstanceKey, orders: Sequence[RequestOrder]) -> None:
        """Gives an instance orders about its requests. Raises StepError, or EngineError where its process has ended."""
        await self._call(key, "order", orders=[{"kind": type(order).__name__, "order": order} for order in orders])

    async def check(self, key: InstanceKey) -> tuple[str, ...]:
        """Laws of memory that are broken in an instance, as sentences."""
        return tuple(await self._call(key, "check"))

    async def kill(self, key: InstanceKey) -> None:
        """Ends the instance's process by SIGKILL, so that its own code does not run any more, and waits for its end."""
        child = self._children.get(key)
        if child is None:
            return
        with suppress(ProcessLookupError):
            child.process.kill()
        async with asyncio.timeout(2 * _KILL_TIMEOUT_S):
            await child.process.wait()
            if child.reader is not None:
                await child.reader
        self._children.pop(key, None)

    async def discover(self) -> Discovery:
        """The children of this process: those that live, those that have ended, and every life that it started."""
        living = {key for key, child in self._children.items() if child.is_alive}
        return Discovery(
            living=tuple(sorted(living)),
            leftovers=tuple(sorted(set(self._children) - living)),
            newest=tuple(sorted(self._newest)),
        )

    async def close(self) -> None:
        """Kills all children."""
        await asyncio.gather(*(self.kill(key) for key in list(self._children)))
        if self._temporary is not None:
            self._temporary.cleanup()

    async def _call(self, key: InstanceKey, name: str, **args: Any) -> Any:
        child = self._children.get(key)
        if child is None or not child.is_alive:
            raise EngineError(_end(child))
        child.next_id += 1
        number = child.next_id
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        child.calls[number] = answer
        line = json.dumps({"id": number, "term": self._term.number, "call": name, "args": to_data(args)}) + "\n"
        assert child.process.stdin is not None
        try:
            child.process.stdin.write(line.encode())
            await child.process.stdin.drain()
            return await answer
        except ConnectionError as error:
            raise EngineError(_end(child)) from error
        finally:
            child.calls.pop(number, None)


async def _read(child: _Child) -> None:
    """Hands answers to the calls that wait for them, until the process ends."""
    assert child.process.stdout is not None
    try:
        while line := await child.process.stdout.readline():
            answer = json.loads(line)
            call = child.calls.pop(answer["id"], None)
            if call is None or call.done():
                continue  # its caller has given up
            if "error" in answer:
                call.set_exception(_error(answer["error"]))
            else:
                call.set_result(answer["result"])
        await child.process.wait()
    except ValueError:
        logger.exception("a child wrote what is no answer")
        child.process.kill()
    finally:
        for call in child.calls.values():
            if not call.done():
                call.set_exception(EngineError(_end(child)))


def _error(data: Mapping[str, str]) -> Exception:
    """The deliberate error the child raised, or a RuntimeError that names another one."""
    kind = getattr(errors, data["type"], None)
    if isinstance(kind, type) and issubclass(kind, PengServeError):
        return kind(data["message"])
    return RuntimeError(f"{data['type']}: {data['message']}")


def _end(child: _Child | None) -> str:
    if child is None:
        return "its process has ended"
    lines = [line for line in _tail(child.log_path).splitlines() if line.strip()]
    return f"its process has ended: exit status {child.process.returncode}; {lines[-1] if lines else 'no log'}"


def _tail(path: Path) -> str:
    """The last part of a file; empty where there is none."""
    try:
        return path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""
