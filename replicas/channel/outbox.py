"""Sending from any thread without waiting and without waking another one.

A hand-over to the event loop's thread costs the step loop its GIL for as long as that thread then runs, once a step.
So the thread that has a frame sends it itself, as far as the kernel takes it; only what is left goes to the loop.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Sequence

from pengserve.replicas.channel.frames import Buffer

MAX_BUFFERS = 512  # of one sendmsg; the kernel takes 1,024


class Outbox:
    """The sending side of one connection.

    Frames leave in the order of `send` calls: while a backlog waits, new frames queue behind it.
    """

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        """`loop` sends backlogs. The transport keeps its own descriptor of `connection`, for reading."""
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._socket.setblocking(False)
        self._loop = loop
        self._lock = threading.Lock()
        self._backlog: list[memoryview] = []
        self._closed = False

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Sends or queues a frame; the number of bytes that wait. A connection that is gone takes everything."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        with self._lock:
            if self._closed:
                return 0
            if self._backlog:
                self._backlog += map(_owned, views)
            else:
                left = self._push(views)
                if left:
                    self._backlog = [_owned(view) for view in left]
                    self._loop.call_soon_threadsafe(self._watch)
            return sum(view.nbytes for view in self._backlog)

    def close(self) -> None:
        """Drops what waits. In the loop's thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._backlog = []
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()

    def _push(self, views: list[memoryview]) -> list[memoryview]:
        """Gives the kernel what it takes; what is left."""
        try:
            sent = self._socket.sendmsg(views[:MAX_BUFFERS])
        except BlockingIOError:
            return views
        except OSError:
            return []  # the reader of this connection learns of its end and cleans up
        for i, view in enumerate(views):
            if sent < view.nbytes:
                return [view[sent:], *views[i + 1 :]]
            sent -= view.nbytes
        return []

    def _watch(self) -> None:
        if not self._closed:
            self._loop.add_writer(self._socket.fileno(), self._flush)

    def _flush(self) -> None:
        with self._lock:
            self._backlog = self._push(self._backlog)
            if not self._backlog:
                self._loop.remove_writer(self._socket.fileno())


def _owned(view: memoryview) -> memoryview:
    """A copy: the sender may reuse its buffers once `send` has returned."""
    return memoryview(bytes(view))
