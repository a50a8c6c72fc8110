"""A small HTTP/1.1 client for streamed answers. On two cores the client must not be what is measured.

Every `data:` event gets the time at which the socket delivered it. Only events until the first text, and the last one
with the token counts, are parsed.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_HEAD_END = b"\r\n\r\n"
_EVENT_END = b"\n\n"
_DONE = b"data: [DONE]"


@dataclass(slots=True, kw_only=True)
class Answer:
    """One streamed answer. Times are seconds of `time.perf_counter`."""

    sent_s: float
    first_text_s: float = 0.0
    event_times_s: list[float] = field(default_factory=list)  # of events from the first text on, the last one excluded
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""  # empty: complete
    server: int = 0  # which of several answered


class _Stream(asyncio.Protocol):
    """Decodes one answer at a time; `done` is resolved at its end."""

    def __init__(self) -> None:
        self._buffer = bytearray()  # undecoded bytes of the connection
        self._body = bytearray()  # decoded bytes that hold no whole event yet
        self._in_head = True
        self._chunk_left: int | None = None  # bytes left of the current chunk, its CRLF included
        self._is_last_chunk = False
        self.answer: Answer | None = None
        self.done: asyncio.Future[None] | None = None
        self._last_event = b""

    def expect(self, answer: Answer) -> "asyncio.Future[None]":
        """Prepares for the answer to the request that is about to be written."""
        self.answer, self._in_head, self._chunk_left, self._last_event = answer, True, None, b""
        self._buffer.clear()
        self._body.clear()
        self.done = asyncio.get_running_loop().create_future()
        return self.done

    def data_received(self, data: bytes) -> None:
        """Takes bytes as they come."""
        now_s = time.perf_counter()
        self._buffer += data
        if self._in_head and not self._read_head():
            return
        ended = self._read_chunks()
        while (end := self._body.find(_EVENT_END)) >= 0:
            self._on_event(bytes(self._body[:end]), now_s)
            del self._body[: end + 2]
        if ended:
            self._finish("")

    @property
    def is_silent(self) -> bool:
        """Whether no byte of the answer has come."""
        return self._in_head and not self._buffer

    def connection_lost(self, error: Exception | None) -> None:
        """A connection that ends in mid-answer is an error."""
        self._finish(f"connection lost: {error}")

    def _read_head(self) -> bool:
        end = self._buffer.find(_HEAD_END)
        if end < 0:
            return False
        head = bytes(self._buffer[:end]).lower()
        del self._buffer[: end + 4]
        self._in_head = False
        if b" 200 " not in head[:16] or b"transfer-encoding: chunked" not in head:
            self._finish(head.split(b"\r\n", 1)[0].decode())
            return False
        return True

    def _read_chunks(self) -> bool:
        """Moves whole and partial chunks to the body; True after the last one."""
        buffer = self._buffer
        while buffer:
            if self._chunk_left is None:
                end = buffer.find(b"\r\n")
                if end < 0:
                    return False
                size = int(buffer[:end].split(b";", 1)[0], 16)
                del buffer[: end + 2]
                self._chunk_left, self._is_last_chunk = size + 2, size == 0
            text_left = self._chunk_left - 2
            taken = min(len(buffer), self._chunk_left)
            self._body += buffer[: max(min(taken, text_left), 0)]
            del buffer[:taken]
            self._chunk_left = self._chunk_left - taken or None
            if self._is_last_chunk and self._chunk_left is None:
                return True
        return False

    def _on_event(self, event: bytes, now_s: float) -> None:
        answer = self.answer
        if answer is None:
            return
        if event == _DONE:
            self._read_usage()
            return
        if not answer.first_text_s:
            if not _has_text(event):
                return
            answer.first_text_s = now_s
        answer.event_times_s.append(now_s)
        self._last_event = event

    def _read_usage(self) -> None:
        assert self.answer is not None
        usage = json.loads(self._last_event.removeprefix(b"data: ")).get("usage") if self._last_event else None
        if usage:
            self.answer.prompt_tokens = usage["prompt_tokens"]
            self.answer.output_tokens = usage["completion_tokens"]
            self.answer.event_times_s.pop()  # the event of the counts carries no token

    def _finish(self, error: str) -> None:
        if self.done is not None and not self.done.done() and self.answer is not None:
            if not error and not self.answer.output_tokens:
                error = "the stream ended without token counts"
            self.answer.error = error
            self.done.set_result(None)


def _has_text(event: bytes) -> bool:
    choices = json.loads(event.removeprefix(b"data: ")).get("choices") or [{}]
    return bool(choices[0].get("delta", {}).get("content"))


class Connection:
    """One keep-alive connection to a server; one request at a time. Reconnects after an error."""

    def __init__(self, base_url: str) -> None:
        self._address = urlsplit(base_url)
        self._transport: asyncio.Transport | None = None
        self._stream = _Stream()

    async def chat(self, body: dict[str, Any], timeout_s: float) -> Answer:
        """Sends a streamed chat request and waits for the end of the answer; errors are in the answer."""
        payload = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._address.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(timeout_s):
                is_old = self._transport is not None and not self._transport.is_closing()
                if not is_old:
                    await self._connect()
                answer = Answer(sent_s=time.perf_counter())
                await self._send(answer, head.encode() + payload)
                if answer.error and is_old and self._stream.is_silent:
                    # Servers close connections that were idle: this one met the request on its way.
                    await self._connect()
                    answer.error = ""
                    await self._send(answer, head.encode() + payload)
        except TimeoutError:
            answer = Answer(sent_s=time.perf_counter(), error=f"no complete answer within {timeout_s:.0f} s")
        except OSError as error:
            answer = Answer(sent_s=time.perf_counter(), error=str(error))
        if answer.error:
            self.close()
        return answer

    @property
    def answer(self) -> Answer | None:
        """The answer under way, or the last one."""
        return self._stream.answer

    def close(self) -> None:
        """Drops the connection."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    async def _send(self, answer: Answer, request: bytes) -> None:
        assert self._transport is not None
        done = self._stream.expect(answer)
        self._transport.write(request)
        await done

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._stream = _Stream()
        self._transport, _ = await loop.create_connection(
            lambda: self._stream, self._address.hostname or "", self._address.port or 80
        )
