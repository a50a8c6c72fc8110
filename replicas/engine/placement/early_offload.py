"""LayerKV's early offloading on an instance: what `planners/early_offload.py` is told of its requests."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from pengserve.planners.early_offload import missing_blocks, spreads_of_decodes, spreads_of_prompts
from pengserve.planners.kv_forecast import Holding
from pengserve.planners.placement.spread import Spread
from pengserve.planners.placement.values import Decode, Machine, PlacementConfig
from pengserve.replicas.engine.placement.slo_gate import Contracts
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle, is_prefilling
from pengserve.replicas.engine.tiers.residency import ResidentRequests
from pengserve.replicas.engine.vllm_seam import Request

PrefillTime = Callable[[int], float | None]
"""Seconds that a prompt of so many tokens takes here; None: none was measured."""


class EarlyOffload:
    """Belongs to the step thread."""

    def __init__(
        self, scheduler: SchedulerHandle, residency: ResidentRequests, contracts: Contracts, prefill_s: PrefillTime
    ) -> None:
        self._scheduler, self._residency, self._contracts = scheduler, residency, contracts
        self._prefill_s = prefill_s
        self._seen: set[str] = set()  # prompts for which Eq. 4 has been asked

    def of_prompts(self, requests: Sequence[Decode], machine: Machine, config: PlacementConfig) -> Mapping[str, Spread]:
        """Layers of prompts that are being computed, each asked for once."""
        prompts = {r.request_id: r for r in self._prompts()}
        self._seen &= prompts.keys()
        new = {name: r.num_prompt_tokens for name, r in prompts.items() if name not in self._seen}
        times = {name: self._prefill_s(count) for name, count in new.items()}
        known = {name: seconds for name, seconds in times.items() if seconds is not None}
        self._seen |= known.keys()
        if not known:
            return {}
        stepped = [request for request in requests if request.is_stepped]
        prompts = {name: new[name] for name in known}
        return spreads_of_prompts(prompts, known, stepped, machine, config.min_gain)

    def missing(self, requests: Sequence[Decode], machine: Machine) -> int:
        """Blocks that will be missing soon, also for the first prompt that waits; 0: there is room."""
        num_free = self._residency.num_cells // machine.num_layers - self._residency.num_held_blocks
        return missing_blocks(num_free, self._holdings(requests, machine), machine.block_size, self._num_next(machine))

    def of_decodes(
        self, missing: int, requests: Sequence[Decode], machine: Machine, config: PlacementConfig
    ) -> Mapping[str, Spread]:
        """Layers of the newest requests that leave so that so many blocks become free."""
        return spreads_of_decodes(missing, self._holdings(requests, machine), requests, machine, config.min_gain)

    def _prompts(self) -> Iterator[Request]:
        return filter(is_prefilling, self._scheduler.running)

    def _num_next(self, machine: Machine) -> int:
        first = next(iter(self._scheduler.waiting), None)
        return -(-first.num_tokens // machine.block_size) if first is not None else 0

    def _holdings(self, requests: Sequence[Decode], machine: Machine) -> list[Holding]:
        return [self._holding(request, machine) for request in requests]

    def _holding(self, decode: Decode, machine: Machine) -> Holding:
        request = self._scheduler.request(decode.request_id)
        most = request.max_tokens - request.num_output_tokens
        median = self._contracts.contract(decode.request_id).median_tokens - request.num_output_tokens
        return Holding(
            request_id=decode.request_id,
            num_blocks=-(-decode.num_tokens // machine.block_size),
            left_tokens=min(most, median) if median > 0 else most,
            kept_layers=machine.num_layers - len(decode.spread.layers(machine.num_layers)),
            started_s=request.arrival_time,
        )
