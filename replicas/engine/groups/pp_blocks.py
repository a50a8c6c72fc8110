"""Blocks and requests of a pipeline's lane: which blocks have memory, and which requests wait for their KV.

A drop makes room before KV has come, and a restore takes room before requests go: meanwhile blocks are withheld from
the scheduler, and requests are expected. What a microbatch under way has still is given to neither (`under_way.py`).
"""

from collections import deque
from collections.abc import Iterable, Set
from contextlib import AbstractContextManager

from pengserve.planners.stages import Parts, stage_of
from pengserve.planners.types.errors import EngineError, StepError
from pengserve.replicas.engine.groups.group_lane import GroupLane
from pengserve.replicas.engine.groups.under_way import Microbatch, ids_of, num_unwritten, spared_blocks
from pengserve.replicas.engine.tiers.residency import ResidentRequests
from pengserve.replicas.engine.tiers.stage_tiers import PipelineSizes, StageTiers
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.memory.layers import LayerMemory


class PpBlocks(GroupLane):
    """What `PpLane` is beside its steps. Most of it is the leader's."""

    residency: ResidentRequests | None
    tiers: StageTiers | None
    sizes: PipelineSizes
    _memory: LayerMemory
    _in_flight: deque[Microbatch]
    _arriving: dict[str, Request]  # requests whose KV is on its way
    _arriving_parked: set[str]  # those of them that stay parked
    _ended: list[str]  # those of them that were aborted since
    _withheld: list[int]  # blocks without memory yet, in the order in which it comes
    _beyond: list[int]  # blocks for which a member's host has no room
    _host_rows: int  # that each member's host has for the lane
    _is_settled: bool
    _is_exchanging: bool

    @property
    def is_settled(self) -> bool:
        """Whether this member has all of its memory, and its part of all KV."""
        return self._is_settled

    def note_settled(self, is_settled: bool) -> None:
        """Something that this member misses is on its way to it, or all has come."""
        self._is_settled = is_settled

    @property
    def is_exchanging(self) -> bool:
        """Leader: whether some member waits for KV or memory since the drop."""
        return self._is_exchanging

    # The host ---------------------------------------------------------------------------------------------------------

    def give_up_host(self) -> None:
        """What the lane has on device and host is of no use any more."""
        if self.tiers is not None:
            self.tiers.clear()

    def share_hosts(self, host_rows: int) -> None:
        """Leader: each member has so many rows of a host tier at least. The lane hands out as many blocks."""
        self._host_rows = host_rows
        count = self.capacity.num_blocks - self.sizes.num_usable(self.sizes.smallest, host_rows)
        self._beyond = self.scheduler.withhold(count)

    @property
    def num_host_rows(self) -> int:
        """Rows of this member's host tier; 0: it has none."""
        return self.tiers.num_host_rows if self.tiers is not None else 0

    def num_places(self, rank: int, host_rows: int) -> int:
        """Blocks that a member has places for: on its device, and on so many rows of its host."""
        device = self.sizes.device_blocks[stage_of(rank, len(self.sizes.stages))]
        return device - 1 + max(0, host_rows) * self.sizes.per_row

    def limit(self, num_columns: int) -> None:
        """Leader: steps may have so many blocks of each device, vLLM's null block among them."""
        if self.residency is not None:
            usable = self.sizes.num_usable(num_columns, self._host_rows)
            self.residency.limit(num_columns, max(0, usable - self._host_rows * self.sizes.per_row))

    # Requests whose KV comes while others run ---------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Blocks that have memory."""
        return self.capacity.num_blocks - len(self._withheld) - len(self._beyond)

    def expect(self, request: Request, num_computed_tokens: int, *, is_parked: bool = False) -> list[int] | None:
        """Leader: as `admit`, but the request is not scheduled before `arrived`; where it `is_parked`, not then."""
        block_ids = self._make_room(request, num_computed_tokens)
        if block_ids is not None:
            self._arriving[request.request_id] = request
            if is_parked:
                self._arriving_parked.add(request.request_id)
        return block_ids

    def withhold_free(self) -> list[int]:
        """Leader of a drop: no free block may be handed out before it has memory on all members; their ids.

        `offer` gives them back, the first ones first.
        """
        self._is_exchanging = True
        self._withheld = self.scheduler.withhold(self.num_free())
        return list(self._withheld)

    def makes_room(self, parts: Parts) -> bool:
        """Leader: whether `give_up_blocks` is worth a wait: microbatches under way have some free blocks still."""
        return self._num_spare() < self._num_given_up(parts) <= self.num_free()

    def _num_given_up(self, parts: Parts) -> int:
        left = self._memory.sizes.num_blocks_left(parts)
        usable = [self.sizes.num_usable(columns, self._host_rows) for columns in (self.sizes.smallest, left)]
        return max(0, usable[0] - usable[1])

    def give_up_blocks(self, parts: Parts) -> list[int]:
        """Leader: withholds as many free blocks as a restore needs, so that the weights that each member has in its
        part find room; their ids.

        Raises:
            StepError: too many are in use.
        """
        count = self._num_given_up(parts)
        if count > (num_spare := self._num_spare()):
            raise StepError(f"{count} blocks must be free to bring the weights back, {num_spare} are")
        with self._sparing():
            self._withheld = self.scheduler.withhold(count)
        self.limit(min(self.sizes.smallest, self._memory.sizes.num_blocks_left(parts)))
        return list(self._withheld)

    def offer(self, count: int) -> None:
        """Leader: `count` more of the withheld blocks have memory on all members."""
        offered, self._withheld = self._withheld[:count], self._withheld[count:]
        self.scheduler.offer(offered)

    def offer_all(self) -> None:
        """Leader: all blocks have memory on all members."""
        self.offer(len(self._withheld))
        self.limit(self.sizes.smallest)

    def arrived(self) -> None:
        """Leader: all KV and all memory are there."""
        self.offer_all()
        for request_id, request in self._arriving.items():
            self.scheduler.enqueue(request)
            self.settle(request)
            if request_id in self._arriving_parked:
                self.keep_parked(request)
        self._arriving, self._arriving_parked = {}, set()
        self._is_exchanging = False
        ended, self._ended = self._ended, []
        super().abort(ended)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forgets requests. One whose KV is on its way keeps its blocks until all of that has come: until then members
        write into them, and no other request may have them.
        """
        ids = list(request_ids)
        self._ended += [request_id for request_id in ids if request_id in self._arriving]
        super().abort(request_id for request_id in ids if request_id not in self._arriving)

    def num_requests(self) -> int:
        """Running and waiting requests, and those whose KV is on its way."""
        return super().num_requests() + self.num_arriving

    @property
    def num_arriving(self) -> int:
        """As of any lane: after a drop."""
        return len(self._arriving)

    def num_arriving_blocks(self) -> int:
        """Blocks of theirs."""
        return sum(map(self.scheduler.num_blocks_of, self._arriving))

    def longest_tokens(self) -> int:
        """As of any group's lane; those whose KV is on its way go on in a moment."""
        return max(super().longest_tokens(), max((r.num_tokens for r in self._arriving.values()), default=0))

    # Requests that come and go one by one -----------------------------------------------------------------------------

    def _note_freed(self, request_id: str) -> None:
        """A request is about to lose its blocks."""
        for microbatch in self._in_flight:
            if request_id in microbatch.output.num_scheduled_tokens:
                microbatch.freed.extend(self.scheduler.block_ids(request_id))

    def _sparing(self) -> AbstractContextManager[None]:
        """Within it no block is handed out that a microbatch under way has still: see `under_way.py`."""
        return self.scheduler.sparing(spared_blocks(self._in_flight))

    def _num_spare(self) -> int:
        with self._sparing():
            return self.num_free()

    def add(self, request: Request) -> None:
        """As of any lane.

        Raises:
            EngineError: a microbatch under way is about one of the same id, whose token the scheduler would take.
        """
        if request.request_id in self.ids_in_flight():
            raise EngineError(f"request {request.request_id} is in a step still: send it under another id")
        super().add(request)

    def _make_room(self, request: Request, num_computed_tokens: int) -> list[int] | None:
        if request.request_id in self.ids_in_flight():  # it left a moment ago
            return None
        with self._sparing():
            return super()._make_room(request, num_computed_tokens)

    def reserve(self, request: Request, num_tokens: int, num_computed_tokens: int) -> int | None:
        """As of any lane; no microbatch under way has the blocks, nor steps one of the same id."""
        if request.request_id in self.ids_in_flight():
            return None
        with self._sparing():
            return super().reserve(request, num_tokens, num_computed_tokens)

    def enlarge(self, request: Request, num_tokens: int) -> bool:
        """As of any lane; no microbatch under way has the blocks."""
        with self._sparing():
            return super().enlarge(request, num_tokens)

    def num_written(self, request: Request) -> int:
        """Without what this member's stage has still to write, for microbatches in flight."""
        num_computed = super().num_written(request)
        return num_computed - num_unwritten(self._in_flight, request.request_id, num_computed)

    def is_between_steps(self, request: Request) -> bool:
        """Whether no microbatch in flight steps it."""
        return request.request_id not in self.ids_in_flight()

    def ids_in_flight(self) -> Set[str]:
        """Leader: requests that microbatches are about which have begun and not ended."""
        return ids_of(self._in_flight)
