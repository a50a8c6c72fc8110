"""The private names of Ray Serve that PengServe changes. Each has a test, so that an upgrade which moves one fails.

The inner gRPC server: each replica listens on all addresses for calls of other deployments, asks for no key, and
unpickles what comes. No other deployment calls PengServe's, so the server stays on loopback.

The application's loop: Serve gives it a thread of its own, so that code which blocks cannot stop Serve's. PengServe's
does not block, and each token of each stream would go from thread to thread: a seventh of an ingress's processor time.
"""

import logging
import os
from typing import Any

INNER_GRPC_VARIABLE = "RAY_SERVE_USE_GRPC_BY_DEFAULT"  # set by operators who want Serve's proxies to call replicas so
# What a replica's process must have before it imports Serve.
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
ALL_ADDRESSES, LOOPBACK = "[::]:", "127.0.0.1:"

logger = logging.getLogger(__name__)


def keep_inner_grpc_on_loopback() -> None:
    """Make the inner gRPC server of a replica in this process listen on loopback. Call before the replica is ready."""
    if os.environ.get(INNER_GRPC_VARIABLE, "0") == "1":
        return
    from ray.serve._private import replica

    original: Any = getattr(replica, "add_port_to_grpc_server", None)
    if original is None:
        logger.warning("Ray Serve has changed: its inner gRPC server may listen on all addresses")
        return

    def add_port(server: Any, address: str) -> int:
        port: int = original(server, address.replace(ALL_ADDRESSES, LOOPBACK, 1))
        return port

    replica.add_port_to_grpc_server = add_port
