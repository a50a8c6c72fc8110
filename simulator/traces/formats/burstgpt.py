"""BurstGPT (HPMLL/BurstGPT): seconds since the collection began. A failed request has 0 response tokens."""

from collections.abc import Iterable, Iterator

from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.formats.base import Format, Options, arrival
from pengserve.simulator.traces.formats.rows import Row


def _read(rows: Iterable[Row], options: Options) -> Iterator[Arrival | None]:
    for row in rows:
        yield arrival(row, row.number_of("Timestamp"), row.tokens("Request tokens"), row.tokens("Response tokens"))


BURSTGPT = Format(
    name="burstgpt",
    summary="CSV: Timestamp, Model, Request tokens, Response tokens, ...",
    keys=(frozenset({"Timestamp", "Request tokens", "Response tokens"}),),
    read=_read,
    starts_at_first=True,
)
