"""Measured matrix products, and what those of a model take."""

import csv
import gzip
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path


class Gemm:
    """Milliseconds of `[m, k] @ [k, n]`, between measured sizes by straight lines along each of the three."""

    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self._ms = {(int(r["m"]), int(r["n"]), int(r["k"])): float(r["latency"]) for r in rows}
        self._sizes = [sorted({key[axis] for key in self._ms}) for axis in range(3)]

    def layers_ms(self, model: Mapping[str, int], tp: int, num_tokens: int) -> float:
        """The four products of every dense layer: queries, keys and values; output; gate and up; down."""
        hidden, head_dim = model["hidden"], model["head_dim"]
        queries = model["heads"] * head_dim // tp
        keys_and_values = 2 * max(1, model["kv_heads"] // tp) * head_dim
        inner = model["inter"] // tp
        shapes = ((queries + keys_and_values, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner))
        return model["layers"] * sum(self.ms(num_tokens, n, k) for n, k in shapes)

    @cache  # noqa: B019 - one object a table, for as long as the program runs
    def ms(self, m: int, n: int, k: int) -> float:
        """One product. Corners that were not measured are left out of the mean."""
        corners = list(product(*(_around(size, sizes) for size, sizes in zip((m, n, k), self._sizes, strict=True))))
        found = [(a[1] * b[1] * c[1], self._ms.get((a[0], b[0], c[0]))) for a, b, c in corners]
        total = sum(weight for weight, ms in found if ms is not None)
        return sum(weight * ms for weight, ms in found if ms is not None) / total


def _around(size: int, sizes: Sequence[int]) -> list[tuple[int, float]]:
    """The measured sizes beside `size`, with their weights."""
    index = bisect_left(sizes, size)
    if index < len(sizes) and sizes[index] == size:
        return [(size, 1.0)]
    index = min(max(index, 1), len(sizes) - 1)
    low, high = sizes[index - 1], sizes[index]
    share = (size - low) / (high - low)
    return [(low, 1.0 - share), (high, share)]
