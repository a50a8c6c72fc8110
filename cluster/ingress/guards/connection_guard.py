"""Time-outs for connections of uvicorn, which has none before a request and none for a client that never reads.

For the processes that listen: ingress replicas, and Ray Serve's own proxies where HAProxy is off. A limit per source is
HAProxy's alone. Costs one timer a connection, nothing a request.
"""

import asyncio
import functools
import logging
import os
import socket
import weakref
from typing import Any

from pengserve.cluster.haproxy.limits import ConnectionLimits

logger = logging.getLogger(__name__)

_NOT_WAITING = object()  # stands for the exchange of a connection that waits for no headers


def install() -> None:
    """Guard all connections that uvicorn accepts in this process from now on, by the variables of `limits.py`."""
    from uvicorn.protocols.http import h11_impl

    protocols: list[type] = [h11_impl.H11Protocol]
    try:
        from uvicorn.protocols.http import httptools_impl

        protocols.append(httptools_impl.HttpToolsProtocol)
    except ImportError:
        pass  # uvicorn then uses the other one
    limits = ConnectionLimits.from_environment(os.environ)
    for protocol in protocols:
        guard(protocol, limits)


def guard(protocol: Any, limits: ConnectionLimits) -> None:
    """Wrap `connection_made` of a class of uvicorn's, once."""
    original = protocol.connection_made
    if getattr(original, "is_guarded", False):
        return

    @functools.wraps(original)
    def connection_made(self: Any, transport: asyncio.Transport) -> None:
        original(self, transport)
        _limit_unread(transport, limits.client_timeout_s)
        _check_later(self, None, limits.header_timeout_s)

    connection_made.is_guarded = True  # type: ignore[attr-defined]
    protocol.connection_made = connection_made


def _limit_unread(transport: asyncio.Transport, timeout_s: int) -> None:
    """Have the kernel end the connection when what was sent stays unread or unconfirmed for so long."""
    connection = transport.get_extra_info("socket")
    is_tcp = connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6)
    if is_tcp and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_s * 1000)


def _check_later(connection: Any, waited_after: Any, timeout_s: int) -> None:
    # A connection that has ended does not stay in memory until its timer is due.
    connection.loop.call_later(timeout_s, _check_headers, weakref.ref(connection), waited_after, timeout_s)


def _check_headers(reference: Any, waited_after: Any, timeout_s: int) -> None:
    """Close a connection that has waited for the headers of one request since the check before, or from its start.

    `waited_after` is the last exchange of the connection at the check before; None stands for its start.
    """
    connection = reference()
    if connection is None or connection.transport.is_closing():
        return
    if connection.transport.get_protocol() is not connection:
        return  # it has become a WebSocket
    exchange = connection.cycle
    is_idle = exchange is None or exchange.response_complete
    is_kept_alive = connection.timeout_keep_alive_task is not None
    if is_idle and not is_kept_alive and exchange is waited_after:
        logger.debug("a client sent no complete headers for %d s", timeout_s)
        connection.transport.close()
        return
    # An exchange that goes on is waited for anew, and so is the time before the next one.
    seen = exchange if is_idle and not is_kept_alive else _NOT_WAITING
    _check_later(connection, seen, timeout_s)
