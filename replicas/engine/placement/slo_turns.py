"""Who waits on the host in a pipeline whose KV is short, while requests have SLOs for their tokens: OrbitFlow's pauses.

`planners/placement/turns.py` decides. A pipeline has a request on its devices or on the host as a whole, so that there
is no placement to search. While no request here has an SLO for its tokens, all is as `ByAge` says.
"""

from collections.abc import Callable, Sequence

from pengserve.planners.placement.turns import coming, is_better_victim, leaving, making_way
from pengserve.planners.placement.values import Decode, PlacementConfig
from pengserve.planners.preemption import QUANTUM_TOKENS
from pengserve.planners.types.placements import PlacementNote
from pengserve.replicas.engine.placement.placement_notes import PlacementNotes
from pengserve.replicas.engine.placement.slo_gate import Contracts
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.tiers.swap_order import ByAge, Rank
from pengserve.replicas.engine.tiers.swapping import SwappedRequests
from pengserve.replicas.engine.vllm_seam import Request

LEAD_STEPS = 8  # before its deposit is spent a paused request counts as one whose client notices
FEW = 64  # requests that came back, up to which none is looked for that has gone


class SloTurns(ByAge):
    """Belongs to the step thread of the pipeline's leader."""

    def __init__(
        self,
        scheduler: SchedulerHandle,
        requests: SwappedRequests,
        contracts: Contracts,
        notes: PlacementNotes,
        tpot_s: Callable[[], float | None],
        *,
        shape: str = "pp",
        config: PlacementConfig | None = None,
    ) -> None:
        """`tpot_s`: seconds between two tokens of a request; None before they were measured."""
        self._scheduler, self._requests, self._contracts = scheduler, requests, contracts
        self._notes, self._tpot_s = notes, tpot_s
        self._shape, self._config = shape, config or PlacementConfig(lead_steps=LEAD_STEPS)
        self._came_back: dict[str, int] = {}  # tokens that a request had when it last came back

    def leaving(self, request: Request, band: int, *, is_coming: bool) -> Rank:
        """By KV times slack; none that came back a moment ago while there are others."""
        if not self._contracts.num_paced:
            return super().leaving(request, band, is_coming=is_coming)
        return leaving(self._decode(request, band, is_coming=is_coming), self._lead_s)

    def coming(self, request: Request, band: int) -> Rank:
        """By slack; who was paused too long first."""
        if not self._contracts.num_paced:
            return super().coming(request, band)
        return coming(self._decode(request, band), self._config)

    def waits_for(self, others: Sequence[Request], victim: Request, band: int) -> bool:
        """For the less urgent, and for one with a deposit where the victim has none."""
        if not self._contracts.num_paced:
            return super().waits_for(others, victim, band)
        decode, lead_s = self._decode(victim, band), self._lead_s
        return any(is_better_victim(self._decode(other, other.priority), decode, lead_s) for other in others)

    def making_way(self, request: Request, running: Sequence[Request]) -> Sequence[Request]:
        """Others, for one that was paused too long or whose client is about to notice."""
        if not self._contracts.num_paced:
            return ()
        by_id = {other.request_id: other for other in running}
        stepped = [self._decode(other, other.priority) for other in running]
        found = making_way(self._decode(request, request.priority), stepped, self._config, self._lead_s)
        return [by_id[decode.request_id] for decode in found]

    def made_way(self, request: Request, num_gone: int) -> None:
        """An event tells it."""
        paused_s = self._requests.parked_s(request) or 0.0
        is_overdue = paused_s >= self._config.max_paused_s
        self._notes.add(
            PlacementNote(
                number=0,
                reason=f"a request has been paused for {paused_s:.1f} s"
                if is_overdue
                else "the deposit of a paused request is nearly spent",
                why=f"{num_gone} requests make way for it",
                shape=self._shape,
                num_away=0,
                num_paused=self._requests.num_parked(),
            )
        )

    def came_back(self, request: Request) -> None:
        """It keeps its place for a while."""
        if len(self._came_back) > FEW:
            self._came_back = {i: n for i, n in self._came_back.items() if self._scheduler.knows(i)}
        self._came_back[request.request_id] = request.num_tokens

    @property
    def _lead_s(self) -> float:
        return self._config.lead_steps * (self._tpot_s() or 0.0)

    def _decode(self, request: Request, band: int, *, is_coming: bool = False) -> Decode:
        name, slo = request.request_id, self._contracts.contract(request.request_id).slo
        since = self._came_back.get(name)
        has_just_come_back = since is not None and request.num_tokens < since + QUANTUM_TOKENS
        return Decode(
            request_id=name,
            num_tokens=request.num_computed_tokens,
            slo_s=slo.tbt_s if slo is not None else None,
            deposit_tokens=self._contracts.deposit_tokens(name) if slo is not None else 0,
            paused_s=self._requests.parked_s(request),
            may_pause=not (is_coming or has_just_come_back),
            rank=(band, request.arrival_time),
        )
