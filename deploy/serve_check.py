"""Check of `make serve`: run it as a user would, stream one chat answer, press Ctrl-C, see that nothing stays behind.

Standard library only: it starts before `.venv` exists. Prints the answer's text and the seconds from the command to the
first token and to the end of the answer. Exits 0 only if the answer came and everything stopped.
"""

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Every process that `make serve` starts inherits this variable, so that those left over can be found afterwards.
MARK = "SERVE_CHECK_RUN"


class CheckError(Exception):
    """What went wrong, in one sentence."""


def main() -> int:
    """Run the check; 0 when all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start-timeout-s", type=float, default=1200.0, help="from the command to readiness")
    parser.add_argument("--stop-timeout-s", type=float, default=90.0, help="from Ctrl-C to the last process")
    parser.add_argument("--question", default="What does json.dumps do?")
    options = parser.parse_args()
    mark, port = uuid.uuid4().hex, _free_port()
    environment = {**os.environ, MARK: mark, "PENGSERVE_HTTP__PORT": str(port)}
    started_s = time.monotonic()
    # A session of its own: Ctrl-C in a terminal reaches the whole foreground group, and so does the signal below.
    serve = subprocess.Popen(["make", "serve"], cwd=ROOT, env=environment, start_new_session=True)
    try:
        _wait_until_ready(serve, port, started_s + options.start_timeout_s)
        print(f"ready after {time.monotonic() - started_s:.1f} s", flush=True)
        text, first_s, last_s = _stream_answer(port, options.question, started_s)
        print(f"question: {options.question}\nanswer:   {text}")
        print(
            f"from the command to the first token: {first_s:.1f} s, to the end of the answer: {last_s:.1f} s",
            flush=True,
        )
        if not text.strip():
            raise CheckError("the answer is empty")
    except (CheckError, OSError, http.client.HTTPException) as error:
        print(f"serve-check failed: {error}", file=sys.stderr)
        return 1
    finally:
        stopped = _stop(serve, mark, options.stop_timeout_s)
    return 0 if stopped else 1


def _wait_until_ready(serve: subprocess.Popen, port: int, deadline_s: float) -> None:
    while time.monotonic() < deadline_s:
        if serve.poll() is not None:
            raise CheckError(f"`make serve` ended with {serve.returncode} before it was ready")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass  # the port is not open yet
        finally:
            connection.close()
        time.sleep(0.2)
    raise CheckError("not ready in time")


def _stream_answer(port: int, question: str, started_s: float) -> tuple[str, float, float]:
    """The text, and the seconds since `started_s` at its first piece and at its end."""
    body = {
        "model": "demo",
        "stream": True,
        "temperature": 0,
        "max_tokens": 128,
        "messages": [{"role": "user", "content": question}],
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise CheckError(f"HTTP {response.status}: {response.read(500)!r}")
    text, first_s = "", 0.0
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if not line.startswith(b"data: "):
            continue
        if data == b"[DONE]":
            return text, first_s, time.monotonic() - started_s
        for choice in json.loads(data).get("choices", []):
            if piece := choice["delta"].get("content"):
                first_s = first_s or time.monotonic() - started_s
                text += piece
    raise CheckError("the stream broke off before [DONE]")


def _stop(serve: subprocess.Popen, mark: str, timeout_s: float) -> bool:
    """Ctrl-C, then wait until every process that `make serve` started is gone; those that stay are killed and named."""
    began_s = time.monotonic()
    if serve.poll() is None:
        os.killpg(serve.pid, signal.SIGINT)
    while (left := _marked_processes(mark)) and time.monotonic() - began_s < timeout_s:
        serve.poll()
        time.sleep(0.2)
    if not left:
        print(f"stopped {time.monotonic() - began_s:.1f} s after Ctrl-C, no process is left", flush=True)
        return True
    for pid, command in left.items():
        print(f"still running {timeout_s:.0f} s after Ctrl-C, killed: {pid} {command}", file=sys.stderr)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return False


def _marked_processes(mark: str) -> dict[int, str]:
    """Living processes that carry the mark in their environment, with the beginning of their command lines."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
        except OSError:
            continue  # it ended, or it belongs to another user
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
