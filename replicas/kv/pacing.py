"""How much is sent at a time of what goes on beside steps: KV after a drop, weights before a restore."""

LEAST_BYTES = 256 << 10
MOST_BYTES = 64 << 20
MOST_GROWTH = 4.0  # from piece to piece: one that the link's buffer took whole was faster than the link is


class Pace:
    """Follows how long pieces take, so that the next one takes about as long as a step."""

    def __init__(self) -> None:
        self.num_bytes = LEAST_BYTES

    def took(self, num_bytes: int, seconds: float, budget_s: float) -> None:
        """A piece of so many bytes took `seconds`, and the next one may take `budget_s`."""
        factor = min(MOST_GROWTH, budget_s / max(1e-6, seconds))
        self.num_bytes = int(min(MOST_BYTES, max(LEAST_BYTES, num_bytes * factor)))
