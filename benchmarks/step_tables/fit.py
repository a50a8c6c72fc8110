"""From decode steps and prefills of a (GPU, model, tp) to one table of what a step of any mix takes."""

import csv
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.step_tables.kernels import Gemm

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FP8_GPU = "h100_sxm"  # the one GPU whose fp8 GEMMs were measured
TERMS = 3  # launch, sequence, context
Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the file, in milliseconds."""

    gpu: str
    model: str
    tp: int
    source: str
    error: float
    launch: float
    sequence: float
    context: float
    pair: float
    linear: tuple[float, ...]  # at `KNOTS`


@dataclass(frozen=True, slots=True)
class _Measured:
    decodes: Sequence[tuple[int, int, float]]  # batch, context of each, ms
    linear: dict[int, float]  # new tokens -> ms
    prefills: Sequence[tuple[int, float]]  # tokens of one prompt, ms
    pair: float


def make_rows(profiles: Path) -> list[Row]:
    """All rows, bf16 first."""
    rows = [_fit(key, measured) for key, measured in _read(profiles / "fitted").items()]
    return rows + list(_fp8_rows(profiles, rows))


def _fit(key: Key, measured: _Measured) -> Row:
    """Attention from batches whose linear part was measured; then the linear part of smaller ones from the rest."""
    linear = dict(measured.linear)
    known = [(batch, context, ms) for batch, context, ms in measured.decodes if batch in linear]
    features = np.array([[1.0, batch, batch * context] for batch, context, _ in known])
    attention = np.array([ms - linear[batch] for batch, _, ms in known])
    launch, sequence, per_token = _nonnegative(features, attention, 1.0 / np.array([ms for *_, ms in known]))
    for knot in KNOTS:
        if knot not in linear:
            rest = [ms - launch - sequence * b - per_token * b * c for b, c, ms in measured.decodes if b == knot]
            linear[knot] = float(np.median(rest))
    row = Row(
        gpu=key[0], model=key[1], tp=key[2], source="aic", error=0.0, launch=launch, sequence=sequence,
        context=per_token, pair=measured.pair, linear=tuple(linear[knot] for knot in KNOTS),
    )  # fmt: skip
    return replace(row, error=_error(row, measured))


def _error(row: Row, measured: _Measured) -> float:
    linear = dict(zip(KNOTS, row.linear, strict=True))
    errors = [
        (linear[b] + row.launch + row.sequence * b + row.context * b * c) / ms - 1.0
        for b, c, ms in measured.decodes
        if b in linear
    ]
    errors += [
        (linear[n] + row.launch + row.sequence + row.pair * n * n) / ms - 1.0
        for n, ms in measured.prefills
        if n in linear
    ]
    return float(np.mean(np.abs(errors)))


def _nonnegative(features: Any, values: Any, weights: Any) -> tuple[float, float, float]:
    """Weighted least squares with no coefficient below 0: the best over all supports, as there are so few."""
    best, least = np.zeros(TERMS), np.inf
    for size in range(TERMS, 0, -1):
        for support in combinations(range(TERMS), size):
            found, *_ = np.linalg.lstsq(features[:, support] * weights[:, None], values * weights, rcond=None)
            solution = np.zeros(TERMS)
            solution[list(support)] = found
            loss = float((((features @ solution - values) * weights) ** 2).sum())
            if found.min() >= 0 and loss < least:
                best, least = solution, loss
    return float(best[0]), float(best[1]), float(best[2])


def _fp8_rows(profiles: Path, rows: Sequence[Row]) -> Iterator[Row]:
    """The bf16 rows of one GPU with its fp8 GEMMs in place of the others; attention, norms and all-reduce stay."""
    models = json.loads((profiles / "fitted" / "models.json").read_text(encoding="utf-8"))
    bf16, fp8 = (
        Gemm(next((profiles / "kernels").glob(f"{FP8_GPU}_*_gemm_{kind}.csv.gz"))) for kind in ("bfloat16", "fp8")
    )
    for row in rows:
        if row.gpu != FP8_GPU:
            continue
        saved = [
            bf16.layers_ms(models[row.model], row.tp, knot) - fp8.layers_ms(models[row.model], row.tp, knot)
            for knot in KNOTS
        ]
        linear = tuple(ms - less for ms, less in zip(row.linear, saved, strict=True))
        yield replace(row, model=f"{row.model}-fp8", source="aic-fp8", linear=linear)


def _read(folder: Path) -> dict[Key, _Measured]:
    decodes: dict[Key, list[tuple[int, int, float]]] = defaultdict(list)
    linear: dict[Key, dict[int, float]] = defaultdict(dict)
    prefills: dict[Key, list[tuple[int, float]]] = defaultdict(list)
    for row in _rows(folder / "decode_step_ms.csv"):
        decodes[_key(row)].append((int(row["batch"]), int(row["ctx"]), float(row["step_ms"])))
    for row in _rows(folder / "prefill_ms.csv"):
        num, linear_ms = int(row["n_tokens"]), float(row["linear_ms"])
        linear[_key(row)][num] = linear_ms
        prefills[_key(row)].append((num, linear_ms + float(row["selfattn_ms"])))
    pairs = {_key(row): float(row["beta_ms_per_tok2"]) for row in _rows(folder / "fit_coefficients.csv")}
    return {key: _Measured(decodes[key], linear[key], prefills[key], pair) for key, pair in pairs.items()}


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _key(row: dict[str, str]) -> Key:
    return row["gpu"], row["model"], int(row["tp"])
