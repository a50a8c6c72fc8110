"""How long a request will wait for its first token, learned from those that came before.

The wait grows with the prompt tokens that an instance has to compute before the first token: those ahead of the
request, and its own. A line is fitted to what was seen lately, for each shape that instances work in. So it is in
seconds, and holds what steps, decoding neighbours and short memory add on this machine now.
"""

from pengserve.planners.decayed_line import DecayedLine

MEMORY = 200.0  # requests: the weight of one falls to 1/e after so many more
MIN_SEEN = 8  # requests of a shape, from which it predicts
MAX_SHAPES = 64
WITHIN_TOKENS = 1.0  # a spread of the tokens below which no slope can be told


def _seconds_at(line: DecayedLine, num_tokens: float) -> float:
    if line.variance < WITHIN_TOKENS:
        return line.mean_y
    return max(0.0, line.mean_y + max(0.0, line.slope) * (num_tokens - line.mean_x))


class TtftModel:
    """Learns and predicts."""

    def __init__(self) -> None:
        self._lines: dict[str, DecayedLine] = {}  # x: tokens, y: seconds

    def learn(self, shape: str, num_tokens: int, ttft_s: float) -> None:
        """A first token came after `ttft_s`, where so many prompt tokens had to be computed for it."""
        if shape not in self._lines and len(self._lines) >= MAX_SHAPES:
            return
        self._lines.setdefault(shape, DecayedLine(1.0 - 1.0 / MEMORY)).add(float(num_tokens), ttft_s)

    def predict(self, shape: str, num_tokens: int) -> float | None:
        """Seconds until the first token; None where too little was seen of that shape."""
        line = self._lines.get(shape)
        return _seconds_at(line, float(num_tokens)) if line is not None and line.num_seen >= MIN_SEEN else None
