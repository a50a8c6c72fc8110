"""A load client in a process of its own: one that shared the servers' interpreter would wait for its lock.

Lines of JSON on its standard input are loads: `{"id", "urls", "clients", "requests": [{"at_s", "tokens", "body"}]}`.
With `clients`, so many send one request after another; without, each is sent at its own time. Of several servers, a
request goes to the one with the fewest requests in flight, as vLLM's own balancer has it, and among these to the one
with the fewest tokens: by tokens alone, a server that lags seems to have room, and gets still more. It answers
`{"id", "begun"}` when every request of a load has its first text, and `{"id", "answers"}` when all have ended. Times
are seconds of `time.perf_counter`, which all processes of a machine share on Linux.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.sse import Answer, Connection

ANSWER_TIMEOUT_S = 120.0
BEGUN_LOOK_S = 0.01
_LINE_BYTES = 64 << 20
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One streamed chat request of a load."""

    prompt: str
    max_tokens: int
    at_s: float = 0.0  # after the load's start
    priority: int = 0  # OpenAI's extension: below zero is urgent
    prompt_tokens: int = 0  # about; for the choice among several servers
    ttft_ms: int = 0  # that it wants its first token within; 0: it does not say

    def body(self, model: str) -> dict[str, Any]:
        """The request as JSON."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        slo = {"slo": {"ttft_ms": self.ttft_ms}} if self.ttft_ms else {}
        return body | slo | ({"priority": self.priority} if self.priority else {})


@dataclass
class Load:
    """A load under way."""

    begun: "Future[None]" = field(default_factory=Future)
    answers: "Future[list[Answer]]" = field(default_factory=Future)  # in the order of the requests

    def wait_begun(self, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Returns when every request has its first text, or has failed."""
        self.begun.result(timeout_s)

    def result(self, timeout_s: float = ANSWER_TIMEOUT_S) -> list[Answer]:
        """The answers, when all have ended; a request that failed has its `error`."""
        return self.answers.result(timeout_s)


class Client:
    """The process. Loads may overlap. A context manager."""

    def __init__(self, url: str | Sequence[str], model: str) -> None:
        self._urls, self._model = [url] if isinstance(url, str) else list(url), model
        self._loads: dict[int, Load] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, name="client", daemon=True)
        self._reader.start()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._reader.join(10)

    def send(self, requests: Iterable[Request], *, clients: int = 0) -> Load:
        """Begins a load; returns at once."""
        number = len(self._loads)
        load = self._loads[number] = Load()
        items = [{"at_s": r.at_s, "tokens": r.prompt_tokens, "body": r.body(self._model)} for r in requests]
        line = json.dumps({"id": number, "urls": self._urls, "clients": clients, "requests": items})
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return load

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            load = self._loads[said["id"]]
            if "begun" in said:
                load.begun.set_result(None)
            else:
                load.answers.set_result([Answer(**answer) for answer in said["answers"]])
        for load in self._loads.values():
            for future in (load.begun, load.answers):
                if not future.done():
                    future.set_exception(RuntimeError("the load client ended; its error is above"))


class _Server:
    """One of the servers, and what is in flight there."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: list[Connection] = []
        self._open: dict[Connection, int] = {}  # -> tokens of the prompt

    @property
    def load(self) -> tuple[int, int]:
        """Requests in flight; and their tokens, prompts and what has come of the answers."""
        tokens = sum(
            prompt + (len(connection.answer.event_times_s) if connection.answer is not None else 0)
            for connection, prompt in self._open.items()
        )
        return len(self._open), tokens

    def open(self, prompt_tokens: int) -> Connection:
        """A connection for one request."""
        connection = self._idle.pop() if self._idle else Connection(self._url)
        self._open[connection] = prompt_tokens
        return connection

    def close(self, connection: Connection) -> None:
        """Its request has ended."""
        del self._open[connection]
        self._idle.append(connection)


def least_loaded(servers: Sequence[_Server]) -> _Server:
    """The one with the fewest requests in flight; among several, with the fewest tokens."""
    return min(servers, key=lambda server: server.load)


class _Load:
    """A load under way, in the client's process."""

    def __init__(self, said: dict[str, Any], servers: Sequence[_Server]) -> None:
        self._said, self._items, self._servers = said, said["requests"], servers
        self._started_s = time.perf_counter()
        self._answers: list[Answer | None] = [None] * len(self._items)
        self._open: dict[int, Connection] = {}

    async def run(self) -> None:
        """Sends everything; tells when all have begun and when all have ended."""
        queue = iter(range(len(self._items)))
        num_clients = self._said["clients"]
        looking = asyncio.create_task(self._look())
        if num_clients:
            await asyncio.gather(*(self._client(queue) for _ in range(num_clients)))
        else:
            await asyncio.gather(*(self._at_its_time(index) for index in queue))
        await looking
        _say({"id": self._said["id"], "answers": [dataclasses.asdict(a) for a in self._answers if a is not None]})

    async def _client(self, queue: Iterator[int]) -> None:
        for index in queue:  # one shared iterator: each request is sent once
            await self._chat(index)

    async def _at_its_time(self, index: int) -> None:
        await asyncio.sleep(max(0.0, self._started_s + self._items[index]["at_s"] - time.perf_counter()))
        await self._chat(index)

    async def _chat(self, index: int) -> None:
        item = self._items[index]
        server = least_loaded(self._servers)
        connection = self._open[index] = server.open(item["tokens"])
        answer = await connection.chat(item["body"], ANSWER_TIMEOUT_S)
        answer.server = self._servers.index(server)
        self._answers[index] = answer
        del self._open[index]
        server.close(connection)

    def _has_begun(self, index: int) -> bool:
        if self._answers[index] is not None:
            return True
        answer = self._open[index].answer if index in self._open else None
        return answer is not None and answer.sent_s >= self._started_s and answer.first_text_s > 0

    async def _look(self) -> None:
        while not all(self._has_begun(index) for index in range(len(self._items))):  # noqa: ASYNC110
            await asyncio.sleep(BEGUN_LOOK_S)
        _say({"id": self._said["id"], "begun": True})


def _say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def _main() -> None:
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    servers: dict[str, _Server] = {}
    tasks = set()
    while line := await reader.readline():
        said = json.loads(line)
        here = [servers.setdefault(url, _Server(url)) for url in said["urls"]]
        task = asyncio.create_task(_Load(said, here).run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def tokens_of(answer: Answer) -> Sequence[tuple[float, float]]:
    """(time, tokens) of each event: an event holds more than one token where the ingress lagged behind."""
    if not answer.event_times_s:
        return ()
    share = answer.output_tokens / len(answer.event_times_s)
    return [(time_s, share) for time_s in answer.event_times_s]


if __name__ == "__main__":
    asyncio.run(_main())
