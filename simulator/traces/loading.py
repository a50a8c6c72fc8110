"""Reads a trace of any known format."""

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.formats.azure import AZURE
from pengserve.simulator.traces.formats.base import Format, Options
from pengserve.simulator.traces.formats.burstgpt import BURSTGPT
from pengserve.simulator.traces.formats.mooncake import MOONCAKE
from pengserve.simulator.traces.formats.orbitflow import ORBITFLOW
from pengserve.simulator.traces.formats.plain import PLAIN, SERVEGEN
from pengserve.simulator.traces.formats.request_log import REQUEST_LOG
from pengserve.simulator.traces.formats.rows import read_rows
from pengserve.simulator.traces.formats.serving_sim import SERVING_SIM

# The first that matches is taken: a format stands before those whose columns are among its own.
FORMATS = (AZURE, BURSTGPT, MOONCAKE, ORBITFLOW, SERVEGEN, PLAIN, SERVING_SIM, REQUEST_LOG)

_LENGTH_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A trace and what its file held besides."""

    arrivals: tuple[Arrival, ...]  # by `at_s`
    format: str
    num_left_out: int  # requests that generated nothing where they were recorded


def load(
    path: str | os.PathLike[str], format: str | None = None, step_s: float | None = None, trace_id: str | None = None
) -> tuple[Arrival, ...]:
    """The requests of the trace at `path`, by the time of their arrival. Arguments as in `read`."""
    return read(path, format, step_s, trace_id).arrivals


def read(
    path: str | os.PathLike[str], format: str | None = None, step_s: float | None = None, trace_id: str | None = None
) -> Loaded:
    """The trace at `path`, as its file holds it.

    Args:
        format: a name of `FORMATS`; None: what the columns or keys of the first row tell.
        step_s: seconds of one decode step, for traces that count arrivals in steps.
        trace_id: which trace, for files that hold several.

    Times of formats with a clock of their own are kept; where the clock is absolute, the first request is at 0.

    Raises:
        ConfigError: one sentence that names the file, and the row and field where one is wrong.
    """
    path = Path(path)
    if step_s is not None and not 0.0 < step_s < float("inf"):
        raise ConfigError(f"step_s must be above 0, got {step_s!r}")
    rows = read_rows(path)
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{path} holds no request: give a trace with at least one row below its header")
    chosen = _detect(path, first.fields) if format is None else _named(format)
    options = Options(step_s=step_s, trace_id=trace_id)
    requests: list[Arrival] = []
    num_rows = 0
    for request in chosen.read(chain([first], rows), options):
        num_rows += 1
        if request is not None:
            requests.append(request)
    if not requests:
        raise ConfigError(f"{path} holds no request that generated a token: give a trace with at least one")
    requests.sort(key=lambda request: request.at_s)
    _check_ids(path, requests)
    if chosen.starts_at_first:
        start_s = requests[0].at_s
        requests = [dataclasses.replace(request, at_s=round(request.at_s - start_s, 6)) for request in requests]
    return Loaded(arrivals=tuple(requests), format=chosen.name, num_left_out=num_rows - len(requests))


def load_lengths(path: str | os.PathLike[str]) -> tuple[tuple[int, int], ...]:
    """`(prompt tokens, output tokens)` of each row of a file of lengths alone, or of each request of a trace.

    Raises:
        ConfigError: as `read`.
    """
    path = Path(path)
    rows = read_rows(path)
    first = next(rows, None)
    if first is None or not set(_LENGTH_COLUMNS) <= set(first.fields):
        return tuple((request.prompt_tokens, request.output_tokens) for request in load(path))
    lengths = []
    for row in chain([first], rows):
        prompt_tokens, output_tokens = (row.tokens(name) for name in _LENGTH_COLUMNS)
        for name, tokens in zip(_LENGTH_COLUMNS, (prompt_tokens, output_tokens), strict=True):
            if tokens == 0:
                raise row.wrong(name, "a whole number above 0")
        lengths.append((prompt_tokens, output_tokens))
    return tuple(lengths)


def _detect(path: Path, fields: Iterable[str]) -> Format:
    fields = list(fields)
    for candidate in FORMATS:
        if candidate.matches(fields):
            return candidate
    if set(_LENGTH_COLUMNS) <= set(fields):
        raise ConfigError(f"{path} holds lengths and no arrivals: name it as the lengths of a generator or of a trace")
    raise ConfigError(
        f"{path} is a trace of no known format, it has {', '.join(fields)[:200]}; known formats are {_known()}"
    )


def _named(name: str) -> Format:
    for candidate in FORMATS:
        if candidate.name == name:
            return candidate
    raise ConfigError(f"unknown trace format {name!r}; known formats are {_known()}")


def _known() -> str:
    return "; ".join(f"{candidate.name} ({candidate.summary})" for candidate in FORMATS)


def _check_ids(path: Path, requests: list[Arrival]) -> None:
    seen: set[str] = set()
    for request in requests:
        if request.request_id in seen:
            raise ConfigError(f"{path} holds two requests named {request.request_id!r}: give each its own request_id")
        seen.add(request.request_id)
