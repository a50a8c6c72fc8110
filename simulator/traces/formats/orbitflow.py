"""OrbitFlow's synthetic traces (Heelim-Hong/ORBITFLOW): arrivals are counted in decode steps, many traces in a file."""

from collections.abc import Iterable, Iterator

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.formats.base import Format, Options, arrival
from pengserve.simulator.traces.formats.rows import Row


def _read(rows: Iterable[Row], options: Options) -> Iterator[Arrival | None]:
    chosen = options.trace_id
    found = False
    path = None
    for row in rows:
        path = row.path
        if options.step_s is None:
            raise ConfigError(f"{row.path} counts arrivals in decode steps: give step_s, the seconds of one step")
        trace_id = row.text("trace_id")
        if chosen is None:
            chosen = trace_id
        if trace_id == chosen:
            found = True
            at_s = row.number_of("arrival_step") * options.step_s
            yield arrival(row, at_s, row.tokens("input_tokens"), row.tokens("output_tokens"), row.text("req"))
        elif options.trace_id is None:
            raise ConfigError(f"{row.path} holds several traces: give trace_id, for example {chosen!r} or {trace_id!r}")
    if not found:
        raise ConfigError(f"{path} holds no row with trace_id {chosen!r}: give one that it holds")


ORBITFLOW = Format(
    name="orbitflow",
    summary="CSV: trace_id, req, arrival_step, input_tokens, output_tokens; needs step_s",
    keys=(frozenset({"trace_id", "req", "arrival_step", "input_tokens", "output_tokens"}),),
    read=_read,
)
