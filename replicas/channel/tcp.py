"""TCP options that make a peer that vanished known: a pulled cable sends no end of the stream."""

import socket
import struct

KEEPALIVE_S = 1  # between two probes of an idle connection

_TIMEVAL = struct.Struct("@ll")


def notice_silence(sock: socket.socket, timeout_s: float) -> None:
    """Counts a host as gone that acknowledges nothing for `timeout_s`, whether this end writes or only waits."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; with it, keepalive ends after the same time
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(timeout_s / KEEPALIVE_S)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1e3))


def send_at_once(sock: socket.socket) -> None:
    """Without Nagle's delay."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def block(sock: socket.socket, timeout_s: float) -> None:
    """Makes `sock` blocking without Nagle's delay, and lets no send, and no silence, last longer than `timeout_s`.

    Kernel time-outs rather than Python's: those cost a `poll` before each call.
    """
    sock.setblocking(True)
    send_at_once(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
    notice_silence(sock, timeout_s)


def set_receive_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Lets no receive on the blocking `sock` wait longer than `timeout_s` for a byte."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))


def _timeval(seconds: float) -> bytes:
    return _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
