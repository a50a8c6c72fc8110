"""Clients that close their connection while their answer is being made, and what the instances then do."""

import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

MAX_TOKENS = 900
WAIT_S = 120.0
MAX_TRIES = 10


@dataclass(frozen=True)
class Long:
    """A request that instances work on for `num_tokens`, as `num_sequences` of them."""

    path: str
    body: Mapping[str, Any]
    num_sequences: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens that are generated where nothing stops it."""
        return MAX_TOKENS * self.num_sequences


def _completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Hi", "max_tokens": MAX_TOKENS, "ignore_eos": True, **fields}


_CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": MAX_TOKENS,
    "ignore_eos": True,
}
_RESPONSES = {"model": "tiny", "input": "Hi", "max_output_tokens": MAX_TOKENS, "ignore_eos": True}

WHOLE: Mapping[str, Long] = {
    "completion": Long("/v1/completions", _completion()),
    "prompts": Long("/v1/completions", _completion(prompt=["Hi", "Ho", "Ha"]), 3),
    "n": Long("/v1/completions", _completion(n=3), 3),
    "chat": Long("/v1/chat/completions", _CHAT),
    "chat-n": Long("/v1/chat/completions", {**_CHAT, "n": 3}, 3),
    "responses": Long("/v1/responses", _RESPONSES),
}
STREAMED: Mapping[str, Long] = {
    f"{name}-stream": Long(long.path, {**long.body, "stream": True}, long.num_sequences) for name, long in WHOLE.items()
}
EVERY_ROUTE: Mapping[str, Long] = {**WHOLE, **STREAMED}


class Load:
    """What the instances behind an ingress do, as its metrics tell."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def close(self) -> None:
        """Closes the connection."""
        self._http.close()

    def refresh(self) -> None:
        """Lets this ingress hear from all instances: the newest it knows of one may be a heartbeat old."""
        body = {"model": "tiny", "prompt": ["Hi"] * 16, "max_tokens": 1}
        assert self._http.post("/v1/completions", json=body).status_code == 200
        self.wait_running(0)

    def num_running(self) -> int:
        """Sequences that instances run."""
        return int(self._sum("pengserve_instance_requests_running"))

    def num_generated(self) -> int:
        """Tokens that instances have generated since they started."""
        return int(self._sum("pengserve_instance_generated_tokens_total"))

    def wait_running(self, count: int) -> None:
        """Blocks until so many sequences run."""
        deadline_s = time.monotonic() + WAIT_S
        while (running := self.num_running()) != count:
            assert time.monotonic() < deadline_s, f"{running} sequences run, not {count}"
            time.sleep(0.005)

    def _sum(self, name: str) -> float:
        families = text_string_to_metric_families(self._http.get("/metrics").text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)


@contextmanager
def asked(url: str, long: Long, headers: Mapping[str, str] | None = None):
    """A socket over which `long` was sent and nothing is read. Closed at the end of the block."""
    address = urlsplit(url)
    body = json.dumps(long.body).encode()
    lines: Sequence[str] = [
        f"POST {long.path} HTTP/1.1",
        f"Host: {address.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        yield connection


def check_leaving(url: str, long: Long, headers: Mapping[str, str] | None = None) -> None:
    """Asks for `long`, leaves, and checks that it ends on the instances long before it would have.

    Measured in tokens, not in seconds: of what was left when the client went, no more than half is generated. What is
    generated before says how soon a busy ingress tells of its load, and nothing of leaving: where little was left by
    then, the client asks again.
    """
    load = Load(url)
    try:
        for _ in range(MAX_TRIES):
            at_leaving, generated = _generated(load, url, long, headers)
            left = long.num_tokens - at_leaving
            if left >= long.num_tokens / 2:
                break
        else:
            raise AssertionError("the ingress always tells too late what runs")
        assert generated - at_leaving < left / 2, (
            f"{generated - at_leaving} of the {left} tokens that were left were generated for a client that had gone"
        )
    finally:
        load.close()


def _generated(load: Load, url: str, long: Long, headers: Mapping[str, str] | None) -> tuple[int, int]:
    """Tokens that were generated when the client left, as far as was known, and in all."""
    load.refresh()
    before = load.num_generated()
    with asked(url, long, headers):
        load.wait_running(long.num_sequences)
        at_leaving = load.num_generated() - before
    load.wait_running(0)
    return at_leaving, load.num_generated() - before
