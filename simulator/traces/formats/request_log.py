"""PengServe's own request log. What became of the requests (`ttft_s`, `end_s`) is not read: a replay finds it anew."""

import dataclasses
from collections.abc import Iterable, Iterator

from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.formats.base import Format, Options, arrival
from pengserve.simulator.traces.formats.rows import Row


def _read(rows: Iterable[Row], options: Options) -> Iterator[Arrival | None]:
    for row in rows:
        request_id = row.text("request_id") if row.fields.get("request_id") not in (None, "") else ""
        at_s = row.number_of("at_s")
        request = arrival(row, at_s, row.tokens("prompt_tokens"), row.tokens("output_tokens"), request_id)
        degree = row.whole("degree", default=0) or None
        if degree is not None and degree < 1:
            raise row.wrong("degree", "a whole number above 0, or null for any")
        yield request and dataclasses.replace(request, priority=row.whole("priority", default=0), degree=degree)


REQUEST_LOG = Format(
    name="pengserve",
    starts_at_first=True,
    summary="JSON lines: at_s, prompt_tokens, output_tokens, and optionally request_id, priority, degree",
    keys=(frozenset({"at_s", "prompt_tokens", "output_tokens"}),),
    read=_read,
)
