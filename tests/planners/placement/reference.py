"""Slow and plain versions of what the placement planner computes."""

import itertools
from collections.abc import Iterator, Sequence

from pengserve.planners.placement.search import Problem
from pengserve.planners.placement.spread import Spread, distances
from pengserve.replicas.kv.staging import turns


def algorithm_1(sizes: Sequence[int], spreads: Sequence[Spread], num_layers: int, layer_s: float, rate: float) -> float:
    """Stalls of a step by OrbitFlow's Algorithm 1: requests that copy share the link evenly, each one layer at a time.

    The printed algorithm forgets what a copy has got when a layer begins; its text does not, and neither does this.
    """
    away = [spread.layers(num_layers) for spread in spreads]
    pending = [list(layers) for layers in away]
    flying: dict[int, tuple[int, float]] = {}  # by request: its layer, and cells that are left
    buffered = [-1] * len(sizes)  # the layer that each request's buffer is for
    stalled_s = 0.0

    def run(until_s: float, until_layer: int | None) -> float:
        """Lets time pass: so much, or until no copy for that layer flies; what has passed."""
        passed_s = 0.0
        while flying and (until_layer is None or any(layer == until_layer for layer, _ in flying.values())):
            share = rate / len(flying)
            step_s = min(left for _, left in flying.values()) / share
            if until_layer is None:
                step_s = min(step_s, until_s - passed_s)
            for request, (layer, left) in list(flying.items()):
                flying[request] = (layer, left - step_s * share)
                if left - step_s * share < 1e-9:
                    del flying[request]
            passed_s += step_s
            if until_layer is None and passed_s >= until_s - 1e-12:
                break
        return passed_s

    for layer in range(num_layers):
        for request, layers in enumerate(pending):
            if layers and buffered[request] < layer and (layers[0] == layer or layer not in away[request]):
                buffered[request] = layers.pop(0)
                flying[request] = (buffered[request], sizes[request])
        stalled_s += run(0.0, layer)
        run(layer_s, None)
    return stalled_s


def ring_stall_s(staged: Sequence[int], layer_s: float, rate: float, num_free: int) -> float:
    """Stalls of a step as the instance's copies follow each other: one thread, in the order of `turns`."""
    read_s: dict[int, float] = {}
    ready_s: dict[int, float] = {}
    copied_s = now_s = 0.0
    due = {turn.layer: turn for turn in turns(staged, num_free)}
    for layer in range(len(staged)):
        if layer in due:
            after = due[layer].after
            copied_s = max(copied_s, read_s[after] if after is not None else 0.0) + staged[layer] / rate
            ready_s[layer] = copied_s
        now_s = max(now_s, ready_s.get(layer, 0.0)) + layer_s
        read_s[layer] = now_s
    return now_s - layer_s * len(staged)


def cost_s(problem: Problem, chosen: Sequence[Spread]) -> float:
    """What a placement costs by the plain rules; infinite where it does not fit."""
    staged = [0] * problem.num_layers
    moved = 0
    for size, spread, now, is_free in zip(problem.full, chosen, problem.now, problem.can_leave_free, strict=True):
        away, was = set(spread.layers(problem.num_layers)), set(now.layers(problem.num_layers))
        for layer in away:
            staged[layer] += size
        moved += size * (len(was - away) + (0 if is_free else len(away - was)))
    num_free = problem.num_spare + sum(staged)
    if num_free < max(staged):
        return float("inf")
    stall = ring_stall_s(staged, problem.layer_s, problem.cells_per_s, num_free)
    return stall * problem.window + moved / problem.cells_per_s


def best_cost_s(problem: Problem) -> float:
    """The least cost of all placements."""
    options = list(all_spreads(problem.num_layers))
    return min(cost_s(problem, chosen) for chosen in itertools.product(options, repeat=len(problem.full)))


def uniform_costs_s(problem: Problem) -> list[float]:
    """The cost of each placement with one spread for all."""
    return [cost_s(problem, [spread] * len(problem.full)) for spread in all_spreads(problem.num_layers)]


def all_spreads(num_layers: int) -> Iterator[Spread]:
    """Every distance that counts, at every phase."""
    yield Spread()
    for distance in distances(num_layers):
        for phase in range(distance):
            yield Spread(distance, phase)
