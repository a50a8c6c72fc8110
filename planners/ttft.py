"""How long a request will wait for its first token, learned from those that came before.

The wait grows with the prompt tokens that an instance has to compute before the first token: those ahead of the
request, and its own. A line is fitted to what was seen lately, for each shape that instances work in. So it is in
seconds, and holds what steps, decoding neighbours and short memory add on this machine now.
"""

from dataclasses import dataclass

MEMORY = 200.0  # requests: the weight of one falls to 1/e after so many more
MIN_SEEN = 8  # requests of a shape, from which it predicts
MAX_SHAPES = 64
WITHIN_TOKENS = 1.0  # a spread of the tokens below which no slope can be told


@dataclass(slots=True)
class _Line:
    """Weighted sums of what was seen; x in tokens, y in seconds."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    num_seen: int = 0

    def learn(self, x: float, y: float) -> None:
        keep = 1.0 - 1.0 / MEMORY
        self.weight = keep * self.weight + 1.0
        self.x, self.y = keep * self.x + x, keep * self.y + y
        self.xx, self.xy = keep * self.xx + x * x, keep * self.xy + x * y
        self.num_seen += 1

    def at(self, x: float) -> float:
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x * mean_x
        if spread < WITHIN_TOKENS:
            return mean_y
        slope = max(0.0, (self.xy / self.weight - mean_x * mean_y) / spread)
        return max(0.0, mean_y + slope * (x - mean_x))


class TtftModel:
    """Learns and predicts."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}

    def learn(self, shape: str, num_tokens: int, ttft_s: float) -> None:
        """A first token came after `ttft_s`, where so many prompt tokens had to be computed for it."""
        if shape not in self._lines and len(self._lines) >= MAX_SHAPES:
            return
        self._lines.setdefault(shape, _Line()).learn(float(num_tokens), ttft_s)

    def predict(self, shape: str, num_tokens: int) -> float | None:
        """Seconds until the first token; None where too little was seen of that shape."""
        line = self._lines.get(shape)
        return line.at(float(num_tokens)) if line is not None and line.num_seen >= MIN_SEEN else None
