"""Traces from traces. `upscale` has a file of its own."""

import dataclasses
import math
from collections.abc import Sequence

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces import checks
from pengserve.simulator.traces.copies import Copier, by_time
from pengserve.simulator.traces.generators.lengths import Lengths
from pengserve.simulator.traces.randomness import streams


def window(arrivals: Sequence[Arrival], start_s: float, stop_s: float) -> tuple[Arrival, ...]:
    """The requests that arrive in [start_s, stop_s), with `start_s` as the new 0.

    Raises:
        ConfigError: none does.
    """
    checks.not_negative(start_s=start_s, stop_s=stop_s)
    kept = tuple(
        dataclasses.replace(request, at_s=round(request.at_s - start_s, 6))
        for request in arrivals
        if start_s <= request.at_s < stop_s
    )
    if not kept:
        last_s = max((request.at_s for request in arrivals), default=0.0)
        raise ConfigError(
            f"window [{start_s:g}, {stop_s:g}) s holds no request: the last one of the trace arrives at {last_s:g} s"
        )
    return kept


def clip(arrivals: Sequence[Arrival], max_model_len: int) -> tuple[Arrival, ...]:
    """Requests that fit a model's context, as vLLM would serve them: outputs end there, and prompts one token before.

    Raises:
        ConfigError: there is no room for a prompt and an output token.
    """
    if max_model_len < 2:
        raise ConfigError(f"max_model_len must be 2 or more, got {max_model_len!r}")
    return tuple(_clipped(request, max_model_len) for request in arrivals)


def scale_rate(arrivals: Sequence[Arrival], factor: float, seed: int) -> tuple[Arrival, ...]:
    """`factor` times as many requests over the same time, from independent parts.

    Below 1 each request is kept with that probability. Above 1 copies of the trace are laid over it, each turned around
    by a random time, and one that is thinned for the fraction. Either way bursts flatten: `upscale` keeps them.

    Raises:
        ConfigError: the factor is not above 0, or leaves no request.
    """
    checks.above_zero(rate_scale=factor)
    (rng,) = streams(seed, "scale_rate")
    copier = Copier(arrivals)
    start_s = arrivals[0].at_s
    # One mean gap beyond the last request, so that turning puts its first one a gap after its last.
    period_s = (arrivals[-1].at_s - start_s) * len(arrivals) / max(1, len(arrivals) - 1)
    requests: list[Arrival] = []
    for number in range(math.ceil(factor)):
        turn_s = rng.uniform(0.0, period_s) if number and period_s else 0.0
        kept = rng.random(len(arrivals)) < factor - number
        for request in (request for request, is_kept in zip(arrivals, kept, strict=True) if is_kept):
            at_s = start_s + (request.at_s - start_s + turn_s) % period_s if number and period_s else request.at_s
            requests.append(copier.copy(request, number, at_s))
    if not requests:
        raise ConfigError(f"rate_scale {factor!r} leaves no request of {len(arrivals)}: give a larger factor")
    return by_time(requests)


def repeat(arrivals: Sequence[Arrival], start_s: float, stop_s: float, until_s: float) -> tuple[Arrival, ...]:
    """The trace before `stop_s`, then what arrived in [start_s, stop_s) again and again before `until_s`.

    Raises:
        ConfigError: nothing arrives in that window.
    """
    window(arrivals, start_s, stop_s)  # refuses an empty one
    copier = Copier(arrivals)
    burst = [request for request in arrivals if start_s <= request.at_s < stop_s]
    requests = [request for request in arrivals if request.at_s < stop_s]
    for number in range(1, math.ceil((until_s - stop_s) / (stop_s - start_s)) + 1):
        shift_s = number * (stop_s - start_s)
        requests += [copier.copy(request, number, request.at_s + shift_s) for request in burst]
    return tuple(request for request in requests if request.at_s < until_s)


def with_lengths(arrivals: Sequence[Arrival], lengths: Lengths, seed: int) -> tuple[Arrival, ...]:
    """The same arrivals with other lengths. Prefixes go: they were those of other prompts."""
    (rng,) = streams(seed, "with_lengths")
    prompts, outputs = lengths.draw(rng, len(arrivals))
    return tuple(
        dataclasses.replace(
            request, prompt_tokens=prompt_tokens, output_tokens=output_tokens, prefix_ids=(), prefix_block=0
        )
        for request, prompt_tokens, output_tokens in zip(arrivals, prompts.tolist(), outputs.tolist(), strict=True)
    )


def _clipped(request: Arrival, max_model_len: int) -> Arrival:
    prompt_tokens = min(request.prompt_tokens, max_model_len - 1)
    output_tokens = min(request.output_tokens, max_model_len - prompt_tokens)
    if (prompt_tokens, output_tokens) == (request.prompt_tokens, request.output_tokens):
        return request
    num_blocks = prompt_tokens // request.prefix_block if request.prefix_block else 0
    return dataclasses.replace(
        request,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefix_ids=request.prefix_ids[:num_blocks],
    )
