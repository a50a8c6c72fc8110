"""What a format is."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.formats.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What some formats need beside the file."""

    step_s: float | None = None  # seconds of one step, where arrivals are counted in steps
    trace_id: str | None = None  # which one, where a file holds several traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of trace files.

    `read` turns each row into its Arrival, or into None for a request that generated nothing: it failed where it was
    recorded, and the trace does not say how many tokens it would have generated.
    """

    name: str
    summary: str
    keys: tuple[frozenset[str], ...]  # any of these sets of columns or keys makes a row one of this format
    read: Callable[[Iterable[Row], Options], Iterator[Arrival | None]]
    starts_at_first: bool = False  # its clock is absolute: the trace starts at its first request

    def matches(self, fields: Iterable[str]) -> bool:
        """Whether a row with these columns or keys may be of this format."""
        return any(keys <= set(fields) for keys in self.keys)


def arrival(row: Row, at_s: float, prompt_tokens: int, output_tokens: int, request_id: str = "") -> Arrival | None:
    """The request of a row; None where it generated nothing.

    Raises:
        ConfigError: it generated tokens from no prompt.
    """
    if output_tokens == 0:
        return None
    if prompt_tokens == 0:
        raise ConfigError(
            f"{row.path}, row {row.number}: a request with {output_tokens} output tokens has no prompt,"
            " give its prompt's tokens or leave the row out"
        )
    return Arrival(
        request_id=request_id or row.request_id, at_s=at_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )
