"""More load with the same temporal pattern, after TraceUpscaler (Sajal et al., EuroSys 2024), as KunServe §5.1 asks.

TraceUpscaler's idea is to decouple arrival times from requests, and to upscale the times alone, so that temporal
patterns stay. The way it is done here is not its algorithm. For a factor f:

1. The gaps between arrivals are cut into sections of neighbours. A section of k gaps becomes one of about f k gaps over
   the same seconds: each gap is taken f times and divided by f, in a random order within the section. (For a fraction
   of f, every so-many-th of the sorted gaps is taken once more, and the section is stretched to its seconds.)
2. The section's requests are taken f times too, in their order, and the copies are interleaved at random.

So every section keeps its seconds and its mix of requests, its rate is f times what it was, and gaps have the same
distribution but for the factor: exactly the same coefficient of variation where f is whole; below 1 it is some percent
lower. Dividing all times by f would shorten bursts, and laying turned copies over each other would flatten them; see
`transforms.scale_rate`. What is lost is the order of the gaps within a section. Where the file's clock is coarse
(BurstGPT's seconds), requests come together in groups; these stay as large as they were and come f times as often.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces import checks
from pengserve.simulator.traces.copies import Copier
from pengserve.simulator.traces.kv_demand import StayModel, demand_of
from pengserve.simulator.traces.randomness import streams

# Gaps of a section, before and after: few, so that it lies within one burst; enough to choose from for a fraction.
_NEIGHBOURS = 8
_CLOSE = 0.01  # relative distance from a wanted demand that needs no further correction
_MOST_CORRECTIONS = 6

Ints = NDArray[np.int64]


def upscale(arrivals: Sequence[Arrival], factor: float, seed: int) -> tuple[Arrival, ...]:
    """`factor` times the rate at every moment, over the same time and as bursty as before; below 1 it scales down.

    Raises:
        ConfigError: the factor is not above 0, or leaves no two requests.
    """
    checks.above_zero(upscale=factor)
    num_gaps = len(arrivals) - 1
    if round(num_gaps * factor) < 1:
        raise ConfigError(f"upscale {factor!r} leaves no gap of {num_gaps}: give a larger factor or a longer trace")
    (rng,) = streams(seed, "upscale")
    copier = Copier(arrivals)
    gaps = np.diff([request.at_s for request in arrivals])
    at_s = arrivals[0].at_s
    scaled: list[Arrival] = []
    for start, stop in _sections(num_gaps, factor):
        count = round(stop * factor) - round(start * factor)
        times = at_s + np.concatenate([[0.0], np.cumsum(_scaled_gaps(gaps[start:stop], count, rng))])
        at_s = arrivals[stop].at_s  # rather than the sum, which rounding moves
        times[-1] = at_s
        is_last = stop == num_gaps  # the last section holds the request after its last gap too
        places, numbers = _interleaved(stop - start, count, rng)
        scaled += [
            copier.copy(arrivals[start + place], number, time)
            for place, number, time in zip(places.tolist(), numbers.tolist(), times[:-1].tolist(), strict=True)
        ]
        if is_last:
            scaled.append(arrivals[-1])
    return tuple(scaled)


def scale_to_kv(arrivals: Sequence[Arrival], mean_kv_tokens: float, stay: StayModel, seed: int) -> tuple[Arrival, ...]:
    """The trace upscaled until its mean demand for KV is `mean_kv_tokens`.

    KunServe §5.1 keeps it below 60 % of the memory. Demand is that of `stay`, without queueing. It grows with the
    rate, but for which requests a fraction leaves: the factor is corrected a few times, and the closest trace taken.
    Where less than some hundred requests remain, a few long ones decide, and it may stay 10 % away.

    Raises:
        ConfigError: as `upscale`.
    """
    checks.above_zero(mean_kv_tokens=mean_kv_tokens)
    factor = 1.0
    ratio = mean_kv_tokens / demand_of(arrivals, stay).mean_tokens  # wanted to what there is
    closest, scaled = math.inf, tuple(arrivals)
    for _ in range(_MOST_CORRECTIONS):
        factor *= ratio
        candidate = upscale(arrivals, factor, seed)
        ratio = mean_kv_tokens / demand_of(candidate, stay).mean_tokens
        if abs(math.log(ratio)) < closest:
            closest, scaled = abs(math.log(ratio)), candidate
        if closest < _CLOSE:
            break
    return scaled


def _sections(num_gaps: int, factor: float) -> Iterator[tuple[int, int]]:
    # Half-open runs of gaps; a short rest joins the one before.
    size = math.ceil(_NEIGHBOURS / min(1.0, factor))
    starts = range(0, max(1, num_gaps - size + 1), size)
    yield from zip(starts, [*starts[1:], num_gaps], strict=True)


def _scaled_gaps(gaps: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    rounds, rest = divmod(count, len(gaps))
    extra = np.sort(gaps)[_evenly(len(gaps), rest, rng)]
    drawn = rng.permutation(np.concatenate([np.tile(gaps, rounds), extra]))
    total = drawn.sum()
    if total == 0.0:  # all that were drawn are of requests that came together
        return np.full(count, gaps.sum() / count)
    return np.asarray(drawn * (gaps.sum() / total))


def _interleaved(size: int, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    # `count` arrivals of a section of `size` requests: (place in the section, number of the copy), two arrays [count].
    # Places rise within each copy, so the turns of a conversation stay in order.
    rounds, rest = divmod(count, size)
    places = np.concatenate([np.tile(np.arange(size), rounds), _evenly(size, rest, rng)])
    numbers = np.repeat(np.arange(rounds + 1), [*[size] * rounds, rest])
    shuffled = rng.permutation(numbers)
    in_order = np.empty(count, dtype=np.int64)
    in_order[np.argsort(shuffled, kind="stable")] = places
    return in_order, shuffled


def _evenly(size: int, count: int, rng: np.random.Generator) -> Ints:
    # `count` < `size` places, about evenly far apart, from a random start.
    return ((np.arange(count) + rng.random()) * (size / max(1, count))).astype(np.int64)
