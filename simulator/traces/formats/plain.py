"""Seconds and two lengths: normalised Azure, aibrix and ShareGPT traces, and ServeGen's, which also name the client."""

from collections.abc import Iterable, Iterator

from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.formats.base import Format, Options, arrival
from pengserve.simulator.traces.formats.rows import Row

_COLUMNS = frozenset({"arrival_s", "input_tokens", "output_tokens"})


def _read(rows: Iterable[Row], options: Options) -> Iterator[Arrival | None]:
    for row in rows:
        yield arrival(row, row.number_of("arrival_s"), row.tokens("input_tokens"), row.tokens("output_tokens"))


PLAIN = Format(
    name="plain",
    summary="CSV: arrival_s, input_tokens, output_tokens (normalised Azure, aibrix, ShareGPT)",
    keys=(_COLUMNS,),
    read=_read,
)
SERVEGEN = Format(
    name="servegen",
    summary="CSV: arrival_s, client, input_tokens, output_tokens",
    keys=(_COLUMNS | {"client"},),
    read=_read,
)
