"""The identity of a running cluster, by which a client makes sure that it talks to the one it means.

Addresses do not tell clusters apart: another cluster may answer at one where this one does not listen yet.
"""

import hashlib

CLUSTER_HEADER = "x-pengserve-cluster"


def cluster_id(channel_token: str) -> str:
    """Identity of the application that has this secret; the secret cannot be found from it."""
    return hashlib.sha256(f"pengserve cluster {channel_token}".encode()).hexdigest()[:32]
