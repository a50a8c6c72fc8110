"""The process that compiles a request's schema, pattern or grammar before an instance does: `python -m` this module.

An ingress starts one when the first such request comes. It imports xgrammar once. Each guide is compiled in a fork of
its own with limits of processor time and memory, so that a costly one ends its fork and nothing else.

Frames in both directions are four bytes of length, then JSON. The first frame has the tokenizer and the limit of
processor time, each later one is a guide, and each has one answer. The process ends when its socket does.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from pengserve.replicas.parent_death import signal_when_parent_ends

NICENESS = 10  # streams of this machine come first
COMPILE_WALL_S = 60.0  # a fork that waits for memory or the processor ends as well
COMPILE_MEMORY_BYTES = 512 << 20  # beyond what the process has mapped already
COMPILE_STACK_BYTES = 4 << 20  # half of what a thread of an instance has: nesting that overflows it ends here
MAX_ERROR_CHARS = 400

_LENGTH = struct.Struct(">I")
HEAD_BYTES = _LENGTH.size
_OVER_LIMIT = (signal.SIGPROF, signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL)

Compile = Callable[[dict[str, Any]], None]


def encode(message: dict[str, Any]) -> bytes:
    """A frame."""
    payload = json.dumps(message).encode()
    return _LENGTH.pack(len(payload)) + payload


def frame_length(head: bytes) -> int:
    """Bytes of JSON after this head of four bytes."""
    (length,) = _LENGTH.unpack(head)
    return int(length)


def judge(compile_guide: Compile, guide: dict[str, Any], cpu_s: float) -> dict[str, Any]:
    """Compiles `guide` in a fork; `error` is empty where that succeeds, `over_limit` tells that a limit ended it."""
    reader, writer = os.pipe()
    process_id = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        if not signal_when_parent_ends(signal.SIGKILL, process_id):
            os._exit(0)
        _compile_and_exit(compile_guide, guide, cpu_s, writer)
    os.close(writer)
    with open(reader, "rb") as answer:
        error = answer.read().decode("utf-8", "replace")
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return {"error": "it cannot be compiled", "over_limit": os.WTERMSIG(status) in _OVER_LIMIT}
    return {"error": error, "over_limit": "bad_alloc" in error}


def main(fd: int) -> None:
    """Answers frames on the socket `fd` until it ends."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ingress, which closes the socket
    connection = socket.socket(fileno=fd)
    with connection, connection.makefile("rb") as frames:
        compile_guide, cpu_s = None, 0.0
        while head := frames.read(HEAD_BYTES):
            message = json.loads(frames.read(frame_length(head)))
            if compile_guide is None:
                compile_guide, cpu_s = _compiler(message["tokenizer"], message["any_whitespace"]), message["cpu_s"]
                connection.sendall(encode({}))
            else:
                connection.sendall(encode(judge(compile_guide, message, cpu_s)))


def _compiler(tokenizer: str, any_whitespace: bool) -> Compile:
    """What `XgrammarBackend.compile_grammar` of vLLM does, without importing vLLM (10 s)."""
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(tokenizer)
    # The cache is on as in vLLM: with it xgrammar refuses some guides that it compiles without.
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=True)
    separators = None if any_whitespace else (",", ":")

    def compile_guide(guide: dict[str, Any]) -> None:
        kind, spec = guide["kind"], guide["spec"]
        match kind:
            case "json":
                compiler.compile_json_schema(spec, any_whitespace=any_whitespace, separators=separators)
            case "regex":
                compiler.compile_regex(spec)
            case "ebnf":
                compiler.compile_grammar(spec)
            case "lark":
                compiler.compile_lark(spec)
            case "structural_tag":
                _compile_structural_tag(xgrammar, compiler, spec)
            case _:
                raise ValueError(f"there is no guide of kind {kind}")

    return compile_guide


def _compile_structural_tag(xgrammar: Any, compiler: Any, spec: str) -> None:
    tag = json.loads(spec)
    if "structures" not in tag:
        compiler.compile_structural_tag(spec)
        return
    items = [
        xgrammar.StructuralTagItem(begin=each["begin"], schema=json.dumps(each["schema"]), end=each["end"])
        for each in tag["structures"]
    ]
    compiler.compile_structural_tag(items, tag["triggers"])


def _compile_and_exit(compile_guide: Compile, guide: dict[str, Any], cpu_s: float, writer: int) -> None:
    """The whole life of a fork."""
    try:
        _limit_this_process(cpu_s)
        compile_guide(guide)
    except BaseException as error:
        text = str(error)[:MAX_ERROR_CHARS] or type(error).__name__
        with contextlib.suppress(OSError):
            os.write(writer, text.encode("utf-8", "replace"))
    finally:
        os._exit(0)


def _limit_this_process(cpu_s: float) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)  # xgrammar writes warnings about schemas
    with open("/proc/self/statm") as statm:
        mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    most_bytes = mapped_bytes + COMPILE_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_STACK, (COMPILE_STACK_BYTES, COMPILE_STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    whole_s = int(cpu_s) + 1  # the timer below is exact
    resource.setrlimit(resource.RLIMIT_CPU, (whole_s, whole_s))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, COMPILE_WALL_S)


if __name__ == "__main__":
    main(int(sys.argv[1]))
