"""The request log: one JSON line for each sequence that ended, for `pengserve replay`. Never a word of its text.

    {"at_s":1795263698.21,"prompt_tokens":812,"output_tokens":120,"priority":0,"degree":null,"ttft_s":0.21,
     "e2e_s":4.02,"finish":"stop","instance":"1.0","losses":0,"request_id":"cmpl-3f2a-0",
     "life":"0.001 sent 0.0; 1.250 carried 1.0"}

`at_s` is when it came, in seconds since the Unix epoch; `degree` is the parallelism it wished; `ttft_s` is null where
no token came; `finish` is stop, length, abort, error or what else the engine says; `losses` counts instances that died
under it; `life` says where it ran and what moved it, each with the seconds after it came, for `pengserve why`. The
event loop only notes what ended; a thread writes it, once a second.
"""

import asyncio
import errno
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, time
from typing import Any

from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.controller.line_file import DEFAULT_LIMITS, FileLimits, LineFile

logger = logging.getLogger(__name__)

FLUSH_PERIOD_S = 1.0
MAX_BUFFERED = 65_536  # lines that wait for a slow disk; further ones are left out
RETRY_S = 30.0  # after a write that found the disk full
DIGITS = 6  # of seconds

_FULL = (errno.ENOSPC, errno.EDQUOT)


class RequestLog:
    """Buffers lines in the event loop and appends them to a file in a thread.

    Several ingresses of one machine may share a file: whole lines are appended. A full disk costs the lines of that
    time and one warning, any other failure the log; serving goes on.
    """

    def __init__(
        self, path: str = "", limits: FileLimits = DEFAULT_LIMITS, *, wall_clock: Callable[[], float] = time
    ) -> None:
        """An empty `path` logs nothing."""
        self._file = LineFile(Path(path), limits) if path else None
        self._retry_at_s: float | None = None  # while the disk is full
        self._wall_clock = wall_clock
        self._rows: list[dict[str, Any]] = []
        self._num_left_out = 0

    @property
    def is_on(self) -> bool:
        """Whether lines are kept and written."""
        return self._file is not None

    def note(self, record: RequestRecord, finish: str) -> None:
        """`record` has ended as `finish` says; it may still know the instance it was on."""
        if self._file is None:
            return
        if len(self._rows) >= MAX_BUFFERED:
            self._num_left_out += 1
            return
        now_s = monotonic()
        e2e_s = now_s - record.created_s
        first_s = record.first_token_s
        self._rows.append(
            {
                "at_s": round(self._wall_clock() - e2e_s, DIGITS),
                "prompt_tokens": record.num_prompt_tokens,
                "output_tokens": len(record.output_token_ids),
                "priority": record.priority,
                "degree": record.options.degree,
                "ttft_s": None if first_s is None else round(first_s - record.created_s, DIGITS),
                "e2e_s": round(e2e_s, DIGITS),
                "finish": finish,
                "instance": None if record.link is None else str(record.link.key),
                "losses": record.num_losses,
                "request_id": record.request_id,
                "life": "; ".join(f"{offset_s:.3f} {what} {where}" for offset_s, what, where in record.life),
            }
        )

    async def run(self) -> None:
        """Writes what was noted, once a period, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_PERIOD_S)
            await self.flush()

    async def flush(self) -> None:
        """Writes what was noted until now."""
        rows, self._rows = self._rows, []
        if not rows or self._file is None:
            return
        if self._retry_at_s is not None and monotonic() < self._retry_at_s:
            self._num_left_out += len(rows)
            return
        try:
            await asyncio.to_thread(_append, self._file, rows)
        except OSError as error:
            self._failed(error, len(rows))
            return
        self._retry_at_s = None
        if self._num_left_out:
            logger.warning("%d requests are not in the request log: the disk was full or slow", self._num_left_out)
            self._num_left_out = 0

    def _failed(self, error: OSError, num_rows: int) -> None:
        assert self._file is not None
        path = self._file.path
        if error.errno not in _FULL:
            logger.warning("no request log from here on: %s cannot be written: %s", path, error.strerror)
            self._file = None
            return
        if self._retry_at_s is None:
            logger.warning("the disk is full, and requests are not in the request log %s for now", path)
        self._retry_at_s = monotonic() + RETRY_S
        self._num_left_out += num_rows


def _append(file: LineFile, rows: Sequence[dict[str, Any]]) -> None:
    file.append("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode())
