"""Steps priced by measured tables: `simulator/hardware/coefficients.csv`, one row a (GPU, model, tp).

    step  =  linear(new tokens)  +  launch  +  sequence * sequences  +  context * context of decodes
             +  the sum over prefill chunks of  max(pair * (c^2 + 2 p c), context * (c + p))
             +  the host's part

Every step reads the weights once: `linear` is flat while that takes longest and grows with the tokens after it, so that
decodes beside a prefill cost next to nothing, as in chunked prefill. A chunk of c new tokens attends to the p before it
(KunServe Eq. 1), and has to read their KV even if it is but one token.
"""

import csv
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from pengserve.simulator.timing.ramp import StepRamp
from pengserve.simulator.timing.steps import Batch, prefill_tokens

_FILE = "coefficients.csv"
_PREFIX = "linear_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The engine's own work between two steps: scheduling, input tensors, launching, taking sampled tokens in."""

    step_s: float
    sequence_s: float  # of each sequence in the step
    is_hidden: bool = False  # under the device's work, as with vLLM's asynchronous scheduling: the longer one counts

    def seconds(self, num_sequences: int) -> float:
        """Of one step."""
        return self.step_s + self.sequence_s * num_sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Seconds of the terms above, of the device alone."""

    launch_s: float
    sequence_s: float
    context_s: float  # a decode attends to one token
    pair_s: float  # a new token and one that it attends to, counted as in (c^2 + 2 p c)
    num_tokens: tuple[int, ...]  # where `linear_s` was measured, ascending
    linear_s: tuple[float, ...]
    error: float = 0.0  # mean relative error on the measurements it was made of

    def linear(self, num_tokens: int) -> float:
        """All but attention, for so many new tokens: straight lines between what was measured, and on beyond it."""
        sizes, seconds = self.num_tokens, self.linear_s
        if num_tokens <= sizes[0]:
            return seconds[0]
        index = min(bisect_left(sizes, num_tokens), len(sizes) - 1)
        share = (num_tokens - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
        return seconds[index - 1] + share * (seconds[index] - seconds[index - 1])


class TableTimes:
    """`StepTimes` of one row, with the host's part."""

    def __init__(self, coefficients: Coefficients, host: Host, *, share: float = 1.0) -> None:
        """`share`: of the layers that are computed here; of a stage of s, 1/s."""
        self._table, self._host, self._share = coefficients, host, share

    def step_s(self, batch: Batch) -> float:
        """Seconds of one step."""
        table, num_sequences = self._table, batch.num_decodes + len(batch.prefills)
        device_s = (
            table.linear(batch.num_decodes + prefill_tokens(batch.prefills))
            + table.launch_s
            + table.sequence_s * num_sequences
            + table.context_s * batch.context_tokens
        )
        for prefix, num in ((chunk.prefix_tokens, chunk.num_tokens) for chunk in batch.prefills):
            device_s += max(table.pair_s * num * (num + 2 * prefix), table.context_s * (num + prefix))
        device_s, host_s = device_s * self._share, self._host.seconds(num_sequences)
        return max(device_s, host_s) if self._host.is_hidden else device_s + host_s

    def decodes_s(self, batch: Batch, num_steps: int) -> float:
        """Seconds of so many steps of the same decodes, each with one token more."""
        return self._ramp(batch).sum_s(num_steps)

    def steps_within(self, batch: Batch, seconds: float) -> int:
        """How many of those end within `seconds`."""
        return self._ramp(batch).steps_within(seconds)

    def stage(self, num_stages: int) -> "TableTimes":
        """One of so many stages."""
        return TableTimes(self._table, self._host, share=self._share / num_stages)

    def _ramp(self, batch: Batch) -> StepRamp:
        assert not batch.prefills, "steps in a row are of decodes alone"
        table, num = self._table, batch.num_decodes
        first_s = table.linear(num) + table.launch_s + table.sequence_s * num + table.context_s * batch.context_tokens
        first_s, slope_s, host_s = first_s * self._share, table.context_s * num * self._share, self._host.seconds(num)
        return StepRamp(first_s, slope_s, host_s) if self._host.is_hidden else StepRamp(first_s + host_s, slope_s)


@cache
def measured() -> Mapping[tuple[str, str, int], Coefficients]:
    """All rows, by GPU, model and tp as the file calls them."""
    text = files("pengserve.simulator.hardware").joinpath(_FILE).read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {(row["gpu"], row["model"], int(row["tp"])): _coefficients(row) for row in rows}


def _coefficients(row: Mapping[str, str]) -> Coefficients:
    linear = {int(name.removeprefix(_PREFIX)): float(ms) * 1e-3 for name, ms in row.items() if name.startswith(_PREFIX)}
    return Coefficients(
        launch_s=float(row["launch"]) * 1e-3,
        sequence_s=float(row["sequence"]) * 1e-3,
        context_s=float(row["context"]) * 1e-3,
        pair_s=float(row["pair"]) * 1e-3,
        num_tokens=tuple(linear),
        linear_s=tuple(linear.values()),
        error=float(row["error"]),
    )
