"""Mooncake (kvcache-ai/Mooncake): milliseconds, lengths, and an id for each 512 tokens of the prompt.

Equal ids mean equal content up to there. The last id is of a block that is not full, and no cache keeps such a block.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.formats.base import Format, Options, arrival
from pengserve.simulator.traces.formats.rows import Row

PREFIX_BLOCK = 512


def _read(rows: Iterable[Row], options: Options) -> Iterator[Arrival | None]:
    for row in rows:
        prompt_tokens = row.tokens("input_length")
        ids = row.ids("hash_ids")
        full_blocks = prompt_tokens // PREFIX_BLOCK
        if len(ids) < full_blocks:
            raise row.wrong("hash_ids", f"a list of {full_blocks} ids or more, one for each {PREFIX_BLOCK} tokens")
        request = arrival(row, row.number_of("timestamp") / 1e3, prompt_tokens, row.tokens("output_length"))
        yield request and dataclasses.replace(request, prefix_ids=ids[:full_blocks], prefix_block=PREFIX_BLOCK)


MOONCAKE = Format(
    name="mooncake",
    summary="JSON lines: timestamp (ms), input_length, output_length, hash_ids",
    keys=(frozenset({"timestamp", "input_length", "output_length", "hash_ids"}),),
    read=_read,
)
