"""Layers that leave before KV is short: LayerKV's Eq. 4 for prompts, and Eq. 5 for requests that decode.

    Eq. 4   a prompt that is being computed keeps x layers: the others leave meanwhile, and cost nothing
    Eq. 5   where free blocks will not do for the next stages, the newest requests give up x/2 layers, then x

Layers leave only where steps do not wait for them (`predicted_s`): a link that is too slow keeps all of them here. Once
KV is short, the placement planner goes on from there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pengserve.planners.kv_forecast import Holding, early_offloads, forecast
from pengserve.planners.placement.solver import predicted_s
from pengserve.planners.placement.spread import Spread, evenly
from pengserve.planners.placement.values import Decode, Machine
from pengserve.planners.slo_admission import OffloadCost

NUM_STAGES = 8  # that are looked ahead: each gives each request one block more
Spreads = dict[str, Spread]


def spreads_of_prompts(
    prompts: Mapping[str, int],
    prefill_s: Mapping[str, float],
    requests: Sequence[Decode],
    machine: Machine,
    most_longer: float,
) -> Spreads:
    """Where layers of prompts go while these are computed (Eq. 4), where the steps after that do not wait for them.

    Args:
        prompts: tokens of each.
        prefill_s: seconds that each takes.
        requests: that decode.
        most_longer: share of a step by which it may become longer.
    """
    cost = OffloadCost(bytes_per_token=1.0 / machine.block_size, link_bytes_per_s=machine.cells_per_s)  # in cells
    roomy = replace(machine, num_cells=1 << 60)  # whether all of them fit then is for the placement planner
    found: Spreads = {}
    for name, num_tokens in prompts.items():
        kept = cost.kept_layers(num_tokens, machine.num_layers, prefill_s[name])
        spread = evenly(machine.num_layers - kept, machine.num_layers, at_most=True)
        then = [*requests, Decode(request_id=name, num_tokens=num_tokens, spread=spread)]
        computed_s = machine.step_s + machine.context_s * sum(request.num_tokens for request in then)
        if spread.distance and predicted_s(then, roomy) <= computed_s * (1.0 + most_longer):
            found[name] = spread
    return found


def missing_blocks(num_free: int, running: Sequence[Holding], block_size: int, num_next: int) -> int:
    """Blocks that will be missing within the next stages, if `num_next` are needed for the next prompt; 0: none."""
    return max(0, num_next - min(forecast(num_free, running, block_size, NUM_STAGES)))


def spreads_of_decodes(
    missing: int, running: Sequence[Holding], requests: Sequence[Decode], machine: Machine, most_longer: float
) -> Spreads:
    """What the newest requests give up so that `missing` blocks become free (Eq. 5), while steps do not wait for it.

    Args:
        most_longer: share of a step by which it may become longer.
    """
    num_layers, now = machine.num_layers, list(requests)
    most_s = predicted_s(now, machine) * (1.0 + most_longer)
    found: Spreads = {}
    for offload in early_offloads(missing, running, num_layers):
        place = next((i for i, request in enumerate(now) if request.request_id == offload.request_id), None)
        if place is None:
            continue
        before = len(now[place].spread.layers(num_layers))
        spread = evenly(before + offload.num_layers, num_layers)
        tried = [*now[:place], replace(now[place], spread=spread), *now[place + 1 :]]
        if predicted_s(tried, machine) > most_s:
            break
        now, found[offload.request_id] = tried, spread
    return found
