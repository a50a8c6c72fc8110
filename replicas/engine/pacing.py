"""How much is sent at a time of what goes on beside the steps of a group: KV after a drop, weights before a restore."""

from collections.abc import Callable, Sequence

from pengserve.replicas.channel.frames import Buffer

LEAST_BYTES = 256 << 10
MOST_BYTES = 64 << 20

SendPiece = Callable[[int, Sequence[Buffer]], None]
"""Sends parts to a rank; returns when they are on their way, and the tensor may be overwritten."""


class Pace:
    """Follows how long pieces take, so that the next one takes about as long as a step."""

    def __init__(self) -> None:
        self.num_bytes = LEAST_BYTES

    def took(self, num_bytes: int, seconds: float, step_s: float) -> None:
        """A piece of so many bytes took `seconds`, and the newest step `step_s`."""
        self.num_bytes = int(min(MOST_BYTES, max(LEAST_BYTES, num_bytes * step_s / max(1e-6, seconds))))
