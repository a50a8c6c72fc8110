"""Runs HAProxy for a local cluster: no open statistics, and never longer than the process that began it.

    python -IS haproxy_local.py REAL_HAPROXY [the arguments that Ray Serve gives HAProxy]

Ray Serve writes `bind :PORT` and `bind *:PORT` for two pages of statistics that ask for no key, and no setting of it
changes that. Serve takes the path of the HAProxy executable from a variable; `write_launcher` makes one that comes
here. The pages move to Unix sockets beside the configuration, in a directory of the user's own. This process then
becomes HAProxy, so that Serve finds it under the process id it knows.

Standard library only: a reload of HAProxy starts this anew.
"""

import ctypes
import itertools
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
PUBLIC_SECTIONS = ("http_frontend", "grpc_frontend")  # these listen where the user said
_BIND_ALL = re.compile(r"^(\s*bind\s+)\*?:\d+")


def write_launcher(directory: str, haproxy: str) -> str:
    """Write an executable that runs `haproxy` through this module; its path."""
    path = Path(directory) / "haproxy"
    command = shlex.join([sys.executable, "-IS", __file__, haproxy])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    path.chmod(0o700)
    return str(path)


def without_open_ports(config: str, directory: str) -> str:
    """HAProxy's configuration with Unix sockets in `directory` for what listens on every address.

    Sections for users' requests stay as they are.
    """
    lines, section = [], ""
    for line in config.splitlines(keepends=True):
        if line.strip() and not line[0].isspace() and not line.startswith("#"):
            section = line.split()[-1]
        # The name is short: a path of a Unix socket has at most 107 bytes, of which HAProxy adds some.
        socket = rf"\g<1>unix@{directory}/{section[:8]} mode 600"
        lines.append(line if section in PUBLIC_SECTIONS else _BIND_ALL.sub(socket, line))
    return "".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Becomes HAProxy."""
    haproxy, *rest = arguments
    parent = os.getppid()
    # Ray kills the process that began HAProxy, and HAProxy would go on to hold its ports.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)  # it was gone before
    for flag, value in itertools.pairwise(rest):
        if flag == "-f":
            _rewrite(Path(value))
    os.execv(haproxy, [haproxy, *rest])


def _rewrite(path: Path) -> None:
    # In place: Serve knows its HAProxy by the configuration's path. It writes the file anew before each reload.
    config = path.read_text(encoding="utf-8")
    changed = without_open_ports(config, str(path.parent))
    if changed != config:
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        scratch.write_text(changed, encoding="utf-8")
        os.replace(scratch, path)


if __name__ == "__main__":
    main(sys.argv[1:])
