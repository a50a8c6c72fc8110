"""Changes the configuration that Ray Serve writes for HAProxy, line by line. `guarded` is a function of text alone.

Ray Serve 2.60 offers variables for `maxconn` and `timeout client`, and none for the rest of what is changed here.
Standard library only: HAProxy's launcher imports this.
"""

import re
from collections.abc import Mapping

from pengserve.cluster.haproxy.limits import ConnectionLimits

API_FRONTEND = "http_frontend"
PUBLIC_SECTIONS = (API_FRONTEND, "grpc_frontend")  # these listen where the user said
SOURCE_TABLE_SIZE = "100k"  # sources that are counted at the same time, 10 MB at most
OURS = "  # pengserve"  # at the end of each line that was added, so that a second pass finds it

_BIND_ALL = re.compile(r"^(\s*bind\s+)\*?:\d+")
_BIND = re.compile(r"^\s*bind\s")
_MAXCONN = re.compile(r"^(\s*maxconn\s+)\d+")
_CLIENT_TIMEOUT = re.compile(r"^(\s*timeout client\s+)\S+")
_ERROR_FILE = re.compile(r"^\s*errorfile\s")
_ADMIN_MODE = re.compile(r"^(\s*stats socket \S+ mode )666\b")


class UnknownTemplateError(Exception):
    """The configuration lacks a place where a protection belongs: this Ray Serve is another one."""


def guarded(
    config: str,
    directory: str,
    limits: ConnectionLimits,
    *,
    max_connections: int | None = None,
    keeps_client_timeout: bool = False,
    pages: Mapping[int, str] | None = None,
) -> str:
    """HAProxy's configuration with time-outs and limits, and without ports that ask for no key.

    Args:
        config: what Ray Serve wrote, or what this function has returned for it.
        directory: where the Unix sockets go that take the place of open ports.
        max_connections: of the whole process; None keeps the number that is there.
        keeps_client_timeout: the operator has set `timeout client`.
        pages: files with HAProxy's own answers, by status.

    Raises:
        UnknownTemplateError: a protection has no place in this configuration.
    """
    lines: list[str] = []
    section, done = "", set[str]()
    for line in config.splitlines():
        if line.endswith(OURS):
            continue
        if line.strip() and not line[0].isspace() and not line.startswith("#"):
            section = line.split()[-1]
        if section == "global":
            line = _ADMIN_MODE.sub(r"\g<1>600", line)  # by this socket any process could change HAProxy
            if _MAXCONN.match(line) and max_connections is not None:
                line = _MAXCONN.sub(rf"\g<1>{max_connections}", line)
        if section == "defaults" and pages and _ERROR_FILE.match(line):
            continue
        if section == "defaults" and _CLIENT_TIMEOUT.match(line):
            done.add("defaults")
            if not keeps_client_timeout:
                line = _CLIENT_TIMEOUT.sub(rf"\g<1>{limits.client_timeout_s}s", line)
            lines += [line, *_added(_defaults(limits, pages or {}))]
            continue
        if section not in PUBLIC_SECTIONS:
            # The name is short: a path of a Unix socket has at most 107 bytes, of which HAProxy adds some.
            line = _BIND_ALL.sub(rf"\g<1>unix@{directory}/{section[:8]} mode 600", line)
        lines.append(line)
        if section == API_FRONTEND and _BIND.match(line):
            done.add(API_FRONTEND)
            lines += _added(_per_source(limits))
    if missing := {"defaults", API_FRONTEND} - done:
        raise UnknownTemplateError(
            f"Ray Serve's configuration of HAProxy has no {' and no '.join(sorted(missing))} as Ray 2.60 writes it, so"
            " its time-outs and limits cannot be set: install the Ray version that PengServe names"
        )
    return "\n".join(lines) + "\n"


def _defaults(limits: ConnectionLimits, pages: Mapping[int, str]) -> list[str]:
    return [
        f"timeout http-request {limits.header_timeout_s}s",
        "option http-ignore-probes",  # browsers open connections in advance: no 408 for those
        *(f"errorfile {status} {path}" for status, path in sorted(pages.items())),
    ]


def _per_source(limits: ConnectionLimits) -> list[str]:
    trusted = " ".join(limits.trusted_sources)
    unless = f" if !{{ src {trusted} }}" if trusted else ""
    return [
        f"stick-table type ipv6 size {SOURCE_TABLE_SIZE} expire 1m store conn_cur",
        f"tcp-request connection track-sc0 src,ipmask(32,64){unless}",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {limits.max_connections_per_source} }}",
    ]


def _added(lines: list[str]) -> list[str]:
    return [f"    {line}{OURS}" for line in lines]
