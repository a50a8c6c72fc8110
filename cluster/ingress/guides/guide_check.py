"""Compiles what guides an answer (a schema, pattern, grammar) in a process of its own before an instance compiles it.

vLLM compiles on the event loop, where a costly guide would silence all streams, and then again in the engine, where no
time-out ends it. Here the event loop only parses; the process of `guide_process.py` compiles under limits of time and
memory, and a guide that it cannot compile reaches no instance. Requests without a guide touch nothing of this, and the
process starts with the first request that needs it.
"""

import asyncio
import hashlib
import json
import logging
import re
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from pengserve.cluster.ingress.config import LimitConfig
from pengserve.cluster.ingress.errors import OverloadedError
from pengserve.cluster.ingress.guides import guide_process
from pengserve.cluster.ingress.guides.guide_process import COMPILE_MEMORY_BYTES, COMPILE_WALL_S
from pengserve.cluster.ingress.guides.guide_rules import parse_without_compiling
from pengserve.cluster.ingress.vllm_openai_seam import (
    StructuredOutputOptions,
    VllmConfig,
    VLLMValidationError,
    XgrammarBackend,
    get_structured_output_key,
    grammar_is_likely_lark,
)

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 4096  # verdicts
MAX_WAITING = 32  # guides that wait for their turn; beyond, requests with a new guide are refused with 429
START_TIMEOUT_S = 120.0  # importing xgrammar, on a slow machine
RETRY_AFTER_S = 2

UNKNOWN_TO_XGRAMMAR = "xgrammar, the library that guides answers, does not handle this combination"

_PLACE = re.compile(r"\[[\d:]+\] \S+:\d+: ")  # in xgrammar's own source
_KINDS = {
    StructuredOutputOptions.JSON: "json",
    StructuredOutputOptions.REGEX: "regex",
    StructuredOutputOptions.STRUCTURAL_TAG: "structural_tag",
}

Guide = dict[str, str]


class GuideChecker:
    """Says of each guide whether it compiles within the limits. One guide at a time; verdicts are remembered."""

    def __init__(self, describe_tokenizer: Callable[[], dict[str, Any]], cpu_s: float) -> None:
        """`describe_tokenizer` takes long and is called in a thread. `cpu_s`: processor time that a guide may take."""
        self._describe_tokenizer, self._cpu_s = describe_tokenizer, cpu_s
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # digest -> why it is refused; empty: it is not
        self._running: dict[bytes, asyncio.Task[str]] = {}
        self._turn = asyncio.Lock()
        self._process: _GuideProcess | None = None

    async def check(self, params: Any) -> None:
        """Returns when an instance may have a request with these `params.structured_outputs`.

        Raises:
            VLLMValidationError: it does not compile, or not within the limits.
            OverloadedError: too many guides wait (429), or this one could not be compiled now (503).
        """
        guide = guide_of(params)
        if guide is None:
            return
        digest = hashlib.sha256("\n".join((guide["kind"], guide["spec"])).encode("utf-8", "replace")).digest()
        why = self._verdicts.get(digest)
        if why is None:
            why = await self._compile(digest, guide)
        else:
            self._verdicts.move_to_end(digest)
        if why:
            raise VLLMValidationError(why)

    def close(self) -> None:
        """Ends the process, if there is one."""
        for task in self._running.values():
            task.cancel()
        if self._process is not None:
            self._process.end()
            self._process = None

    async def _compile(self, digest: bytes, guide: Guide) -> str:
        task = self._running.get(digest)
        if task is None:
            if len(self._running) >= MAX_WAITING:
                raise OverloadedError(
                    "Too many new schemas and patterns wait to be compiled. Try again later.",
                    HTTPStatus.TOO_MANY_REQUESTS,
                    RETRY_AFTER_S,
                )
            task = self._running[digest] = asyncio.create_task(self._judge(digest, guide))
            task.add_done_callback(lambda done: self._forget(digest, done))
        return await asyncio.shield(task)  # it goes on for others that ask the same when this client leaves

    def _forget(self, digest: bytes, task: "asyncio.Task[str]") -> None:
        del self._running[digest]
        if not task.cancelled():
            task.exception()  # looked at, as the clients that wait for it may all have left

    async def _judge(self, digest: bytes, guide: Guide) -> str:
        async with self._turn:
            try:
                if self._process is None:
                    self._process = await _GuideProcess.start(
                        {**await asyncio.to_thread(self._describe_tokenizer), "cpu_s": self._cpu_s}
                    )
                verdict = await self._process.ask(guide)
            except BaseException as error:
                if self._process is not None:
                    self._process.end()
                    self._process = None
                if not isinstance(error, OSError | EOFError | TimeoutError):
                    raise
                logger.exception("the process that compiles schemas failed; the next request starts another one")
                raise OverloadedError(
                    "The schema or pattern could not be compiled now. Try again later.",
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    RETRY_AFTER_S,
                ) from error
        why = self._verdicts[digest] = self._sentence(verdict)
        if len(self._verdicts) > MAX_REMEMBERED:
            self._verdicts.popitem(last=False)
        return why

    def _sentence(self, verdict: dict[str, Any]) -> str:
        """Why a guide is refused; empty where it is not."""
        if verdict["over_limit"]:
            return (
                f"The schema, pattern or grammar takes more than {self._cpu_s:g} s of processor time or"
                f" {COMPILE_MEMORY_BYTES >> 20} MiB of memory to compile: make it smaller."
            )
        if verdict["error"]:
            why = _PLACE.sub("", verdict["error"]).strip()
            why = UNKNOWN_TO_XGRAMMAR if why.startswith("Check failed") else why
            return f"The schema, pattern or grammar cannot be compiled: {why.rstrip('.')}."
        return ""


class _GuideProcess:
    """One process of `guide_process.py`, and the socket to it."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self._process, self._connection = process, connection

    @classmethod
    async def start(cls, setup: dict[str, Any]) -> "_GuideProcess":
        """Starts a process. It imports while its first guide waits."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        command = [sys.executable, "-m", guide_process.__name__, str(theirs.fileno())]
        try:
            process = await asyncio.to_thread(
                subprocess.Popen, command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        started = cls(process, ours)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await started._send(setup)
                await started._receive()
        except BaseException:
            started.end()
            raise
        return started

    async def ask(self, guide: Guide) -> dict[str, Any]:
        """What became of `guide`.

        Raises:
            OSError, EOFError: the process is gone.
            TimeoutError: it does not answer.
        """
        async with asyncio.timeout(COMPILE_WALL_S + START_TIMEOUT_S):
            await self._send(guide)
            return await self._receive()

    def end(self) -> None:
        """Kills the process, and a fork of it by the end of its socket or its limits."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    async def _send(self, message: dict[str, Any]) -> None:
        await asyncio.get_running_loop().sock_sendall(self._connection, guide_process.encode(message))

    async def _receive(self) -> dict[str, Any]:
        head = await self._read(guide_process.HEAD_BYTES)
        answer: dict[str, Any] = json.loads(await self._read(guide_process.frame_length(head)))
        return answer

    async def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            chunk = await asyncio.get_running_loop().sock_recv(self._connection, count - len(data))
            if not chunk:
                raise EOFError("the process that compiles schemas has ended")
            data += chunk
        return data


def guide_of(params: Any) -> Guide | None:
    """The kind and text of what guides a request with these sampling parameters; None where nothing costly does."""
    option, spec = get_structured_output_key(params.structured_outputs)
    if option is StructuredOutputOptions.GRAMMAR:
        return {"kind": "lark" if grammar_is_likely_lark(spec) else "ebnf", "spec": spec}
    kind = _KINDS.get(option)
    return None if kind is None else {"kind": kind, "spec": spec}


def describe_tokenizer(vllm_config: Any, tokenizer: Any) -> dict[str, Any]:
    """The tokenizer as vLLM's xgrammar backend sees it."""
    backend = XgrammarBackend(vllm_config, tokenizer=tokenizer, vocab_size=vllm_config.model_config.get_vocab_size())
    compiled: Any = backend.compile_grammar(StructuredOutputOptions.REGEX, "a")
    return {
        "tokenizer": compiled.ctx.tokenizer_info.serialize_json(),
        "any_whitespace": not backend.disable_any_whitespace,
    }


def guide_checker(vllm_config: VllmConfig, renderer: Any, limits: LimitConfig) -> GuideChecker | None:
    """None for the libraries other than xgrammar: vLLM's own checks compile with those, in a thread."""
    if vllm_config.structured_outputs_config.backend != "xgrammar":
        return None
    parse_without_compiling()
    return GuideChecker(lambda: describe_tokenizer(vllm_config, renderer.get_tokenizer()), limits.compile_cpu_s)
