"""Recorded vLLM runs as LLMServingSim keeps them: wall-clock arrivals, with the times of each request beside them."""

from collections.abc import Iterable, Iterator

from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.formats.base import Format, Options, arrival
from pengserve.simulator.traces.formats.rows import Row


def _read(rows: Iterable[Row], options: Options) -> Iterator[Arrival | None]:
    for row in rows:
        at_s = row.number_of("arrival_time")
        yield arrival(row, at_s, row.tokens("input_toks"), row.tokens("output_toks"), row.text("request_id"))


SERVING_SIM = Format(
    name="serving_sim",
    summary="JSON lines: request_id, input_toks, output_toks, arrival_time (s since 1970)",
    keys=(frozenset({"request_id", "input_toks", "output_toks", "arrival_time"}),),
    read=_read,
    starts_at_first=True,
)
