"""TCP ports of a local cluster, which no other `pengserve up` of this machine takes at the same time.

A port is free until a server listens, and Ray Serve's servers listen half a minute after they were given their ports.
So each `pengserve up` holds names in the kernel's abstract socket namespace, one for each port or block of ports. A
name belongs to one process, and is free again when that process ends, however it ends.
"""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from pengserve.planners.types.errors import ConfigError

# Above Serve's own ranges and below the kernel's ephemeral ports, which servers are given at random.
BLOCKS = range(18400, 29900, 100)
BLOCK_SIZE = 100
NUM_PROBED = 6  # the first ones are taken first; a server that is left over from a killed cluster holds one of these


@dataclass(frozen=True, slots=True)
class PortBlock:
    """The ports of one local cluster, `[first, first + BLOCK_SIZE)`."""

    first: int

    @property
    def fallback(self) -> int:
        """Of Serve's own proxy, which answers while no ingress does."""
        return self.first

    @property
    def statistics(self) -> range:
        """Of HAProxy's two pages about itself."""
        return range(self.first + 1, self.first + 3)

    @property
    def ingresses(self) -> range:
        """Of the ingress replicas."""
        return range(self.first + 3, self.first + BLOCK_SIZE)


@contextlib.contextmanager
def port_block() -> Iterator[PortBlock]:
    """A block of ports that this process alone uses inside the block.

    Raises:
        ConfigError: there is none left.
    """
    for first in BLOCKS:
        with contextlib.ExitStack() as held:
            if not _hold(held, f"block-{first}") or not all(map(_can_listen, range(first, first + NUM_PROBED))):
                continue
            yield PortBlock(first)
            return
    raise ConfigError(f"no free TCP ports between {BLOCKS.start} and {BLOCKS.stop}: stop other servers")


@contextlib.contextmanager
def http_port(port: int) -> Iterator[None]:
    """Keeps the HTTP port from other `pengserve up` while no server listens there yet.

    Raises:
        ConfigError: another one has it.
    """
    with contextlib.ExitStack() as held:
        if not _hold(held, f"http-{port}"):
            raise ConfigError(f"port {port} belongs to another `pengserve up` that is starting: choose another --port")
        yield


def _hold(held: contextlib.ExitStack, name: str) -> bool:
    """Take a name for as long as `held` is open; whether it was free."""
    holder = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    try:
        holder.bind(f"\0pengserve-{name}")
    except OSError:
        return False
    return True


def _can_listen(port: int) -> bool:
    # Without SO_REUSEADDR, as Serve does: a connection that was closed a moment ago is in the way.
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
