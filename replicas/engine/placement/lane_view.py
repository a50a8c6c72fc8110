"""A lane's requests and cells, as the planner of placements wants to know them."""

import itertools
from collections.abc import Mapping, Sequence

from pengserve.planners.placement.spread import RESIDENT, Spread
from pengserve.planners.placement.values import Decode
from pengserve.planners.residency import DECODE_SHARE
from pengserve.replicas.engine.placement.slo_gate import Contracts
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle, is_prefilling
from pengserve.replicas.engine.tiers.residency import ResidentRequests
from pengserve.replicas.engine.vllm_seam import Request


class LaneView:
    """Belongs to the step thread."""

    def __init__(self, scheduler: SchedulerHandle, residency: ResidentRequests, contracts: Contracts) -> None:
        self._scheduler, self._residency, self._contracts = scheduler, residency, contracts
        self._tiers = residency.tiers
        self._shared: tuple[frozenset[str], int] = frozenset(), 0  # of these requests, blocks that others have counted

    def decodes(self, spreads: Mapping[str, Spread]) -> list[Decode]:
        """Requests that decode, or could, but for those about which an order of the controller says something."""
        scheduler, residency = self._scheduler, self._residency
        here = (*scheduler.running, *scheduler.holding, *residency.parked)
        return [
            self._decode(request, spreads.get(request.request_id, RESIDENT))
            for request in here
            if not is_prefilling(request)
            and not residency.is_ordered(request)
            and not residency.layers.is_ordered(request.request_id)
        ]

    def num_cells(self, requests: Sequence[Decode]) -> int:
        """What requests that decode have of the device. A block that several have counts once: for each of the others
        there is a cell more in each layer.
        """
        ids = frozenset(request.request_id for request in requests)
        if ids != self._shared[0]:  # a request shares what it began with
            shared = [self._scheduler.shared_blocks(request_id) for request_id in ids]
            self._shared = ids, sum(map(len, shared)) - len({block for blocks in shared for block in blocks})
        return self._residency.num_cells + self._shared[1] * self._tiers.num_layers - self.prompt_cells()

    def prompt_tokens(self) -> int:
        """Tokens of prompts that are not computed yet, of all requests here."""
        return self._scheduler.prefilling_tokens() + self._scheduler.queued_tokens()

    def prompt_cells(self) -> int:
        """Cells that prompts under way take, and the next one that waits: up to half of the device."""
        scheduler = self._scheduler
        prompts = [r for r in scheduler.running if is_prefilling(r)]
        if scheduler.takes_new and scheduler.new_slots:
            prompts += itertools.islice(scheduler.waiting, 1)
        ordered = [r for r in scheduler.running if self._residency.layers.is_ordered(r.request_id)]
        cells = sum(self._cells_of_prompt(request) for request in prompts)
        cells = min(cells, int(DECODE_SHARE * self._residency.num_cells))
        return cells + sum(self.blocks(r.num_tokens) * self._tiers.num_layers for r in ordered)

    def _cells_of_prompt(self, request: Request) -> int:
        """As `planners/residency.py` counts them: what is written is in all layers, and all blocks in one at a time."""
        missing = min(request.num_tokens - request.num_computed_tokens, self._scheduler.max_step_tokens)
        blocks = self.blocks(request.num_tokens)
        return min(blocks, self.blocks(missing) + 1) * self._tiers.num_layers + blocks

    def blocks(self, num_tokens: int) -> int:
        """That hold so many tokens."""
        return -(-num_tokens // self._tiers.block_size)

    def _decode(self, request: Request, spread: Spread) -> Decode:
        name, slo = request.request_id, self._contracts.contract(request.request_id).slo
        return Decode(
            request_id=name,
            num_tokens=request.num_computed_tokens,
            slo_s=slo.tbt_s if slo is not None else None,
            deposit_tokens=self._contracts.deposit_tokens(name) if slo is not None else 0,
            paused_s=self._residency.parked_s(request),
            spread=spread,
            may_pause=not self._residency.has_just_come_back(request),
            is_coming=self._residency.is_coming(request),
            rank=(request.priority, request.arrival_time),
        )
