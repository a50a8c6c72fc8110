"""Layers of requests that are kept on the host: what was said of each request, carried out as its blocks fill."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.tiers.lane_tiers import LaneTiers
from pengserve.replicas.engine.vllm_seam import Request


@dataclass(slots=True)
class _Placed:
    layers: tuple[int, ...]
    is_ordered: bool  # by the controller
    num_done: int = 0  # its first full blocks, of which the tiers know
    last_done: int = 0  # the last one of them


class PlacedLayers:
    """Belongs to the step thread. A block that other requests hold too stays where it is: it is theirs as well."""

    def __init__(self, scheduler: SchedulerHandle, tiers: LaneTiers, written: Callable[[Request], int]) -> None:
        """`written`: tokens of a request whose KV is there."""
        self._scheduler, self._tiers, self._written = scheduler, tiers, written
        self._placed: dict[str, _Placed] = {}

    def __len__(self) -> int:
        return len(self._placed)

    def say(self, request_id: str, layers: Sequence[int], *, is_ordered: bool = False) -> None:
        """Full blocks of a request that is here are on the host alone in these layers of the model from now on."""
        before = self._placed.pop(request_id, None)
        wanted = tuple(layer for layer in sorted(set(layers)) if 0 <= layer < self._tiers.num_model_layers)
        if before is None and not wanted:
            return
        placed = _Placed(wanted, is_ordered)
        if wanted:
            self._placed[request_id] = placed
        self._carry_out(request_id, placed)

    def layers(self, request_id: str) -> tuple[int, ...]:
        """Those of a request that are on this member's host, counted from its first; none where nothing was said."""
        placed = self._placed.get(request_id)
        return tuple(self._tiers.own(placed.layers)) if placed is not None else ()

    def is_ordered(self, request_id: str) -> bool:
        """Whether an order of the controller says where its layers are."""
        placed = self._placed.get(request_id)
        return placed is not None and placed.is_ordered

    def num_away(self, request: Request, num_shared: int) -> int:
        """Blocks of a request that are on the host alone in its layers, if `num_shared` of its blocks are shared."""
        if not self.layers(request.request_id):
            return 0
        return max(0, request.num_computed_tokens // self._tiers.block_size - num_shared)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests are not here any more; unknown ids are left alone."""
        for request_id in request_ids:
            self._placed.pop(request_id, None)

    def renew(self) -> None:
        """Blocks that have filled since go where those before them are."""
        for request_id in [i for i in self._placed if not self._scheduler.knows(i)]:
            del self._placed[request_id]
        for request_id, placed in self._placed.items():
            self._carry_out(request_id, placed)

    def _carry_out(self, request_id: str, placed: _Placed) -> None:
        num_full = self._written(self._scheduler.request(request_id)) // self._tiers.block_size
        if num_full == placed.num_done:
            return
        full = self._scheduler.block_ids(request_id)[:num_full]
        if num_full < placed.num_done or (placed.num_done and full[placed.num_done - 1] != placed.last_done):
            placed.num_done = 0  # its KV is in other blocks: it was given up, or has been in another lane meanwhile
        blocks, shared = full[placed.num_done :], set(self._scheduler.shared_blocks(request_id))
        placed.num_done, placed.last_done = num_full, full[-1] if full else 0
        if own := [block for block in blocks if block not in shared]:
            self._tiers.place(own, placed.layers)
