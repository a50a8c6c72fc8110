"""Azure LLM inference traces (Azure/AzurePublicDataset), as published: an absolute time stamp and two lengths."""

from collections.abc import Iterable, Iterator

from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.formats.base import Format, Options, arrival
from pengserve.simulator.traces.formats.rows import Row


def _read(rows: Iterable[Row], options: Options) -> Iterator[Arrival | None]:
    for row in rows:
        yield arrival(row, row.moment("TIMESTAMP"), row.tokens("ContextTokens"), row.tokens("GeneratedTokens"))


AZURE = Format(
    name="azure",
    summary="CSV: TIMESTAMP, ContextTokens, GeneratedTokens",
    keys=(frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),),
    read=_read,
    starts_at_first=True,
)
