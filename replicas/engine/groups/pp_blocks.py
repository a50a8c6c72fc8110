"""Blocks and requests of a pipeline's lane: which blocks have memory, and which requests wait for their KV.

A drop makes room before KV has come, and a restore takes room before requests go: meanwhile blocks are withheld from
the scheduler, and requests are expected. What a microbatch under way has still is given to neither (`under_way.py`).
"""

from collections import deque
from collections.abc import Iterable, Set
from contextlib import AbstractContextManager

from pengserve.planners.stages import Parts
from pengserve.planners.types.errors import EngineError, StepError
from pengserve.replicas.engine.groups.group_lane import GroupLane
from pengserve.replicas.engine.groups.under_way import Microbatch, ids_of, is_brought, num_unwritten, spared_blocks
from pengserve.replicas.engine.tiers.stage_host import StageHost
from pengserve.replicas.engine.tiers.swapping import SwappedRequests
from pengserve.replicas.engine.vllm_seam import Request
from pengserve.replicas.memory.layers import LayerMemory


class PpBlocks(GroupLane):
    """What `PpLane` is beside its steps. Most of it is the leader's."""

    residency: SwappedRequests | None
    host: StageHost
    _memory: LayerMemory
    _in_flight: deque[Microbatch]
    _arriving: dict[str, Request]  # requests whose KV is on its way
    _arriving_parked: set[str]  # those of them that stay parked
    _ended: list[str]  # those of them that were aborted since
    _withheld: list[int]  # blocks without memory yet, in the order in which it comes
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
        """What the stage rows hold is of no use any more."""
        self.host.give_up()

    def rows_of(self, request: Request) -> list[int]:
        """Leader: stage rows that have the KV of a request which has no blocks; empty where it has."""
        return self.host.rows_of(request)

    # Requests whose KV comes while others run ---------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Blocks that have memory."""
        return self.capacity.num_blocks - len(self._withheld)

    def expect(self, request: Request, num_computed_tokens: int, *, is_parked: bool = False) -> list[int] | None:
        """Leader: as `admit`, but the request is not scheduled before `arrived`; where it `is_parked`, not then."""
        block_ids = self._make_room(request, num_computed_tokens)
        if block_ids is not None:
            self._await(request, is_parked)
        return block_ids

    def expect_away(self, request: Request, num_computed_tokens: int, *, is_parked: bool = False) -> list[int] | None:
        """Leader: as `expect`, but its KV comes to the hosts; its stage rows, or None where there is no room."""
        rows = self.expect_parked(request, num_computed_tokens)
        if rows is not None:
            self._await(request, is_parked)
        return rows

    def _await(self, request: Request, is_parked: bool) -> None:
        self._arriving[request.request_id] = request
        if is_parked:
            self._arriving_parked.add(request.request_id)

    def expect_parked(self, request: Request, num_computed_tokens: int) -> list[int] | None:
        """Leader: a request's KV comes to the hosts before the lane runs; its stage rows, or None without room.

        The caller keeps it then (`keep_away`).
        """
        self.rehash(request)
        return self.residency.expect(request, num_computed_tokens) if self.residency is not None else None

    def keep_away(self, request: Request, *, is_ordered: bool) -> None:
        """Leader: the KV of an expected request is on the hosts: it is parked, and goes on when there is room."""
        assert self.residency is not None
        self.residency.keep(request, is_ordered=is_ordered)

    def withhold_free(self) -> list[int]:
        """Leader of a drop: no free block may be handed out before it has memory on all members; their ids.

        `offer` gives them back, the first ones first.
        """
        self._is_exchanging = True
        self._withheld = self.scheduler.withhold(self.num_free())
        return list(self._withheld)

    def makes_room(self, parts: Parts) -> bool:
        """Leader: whether `give_up_blocks` is worth a wait, for microbatches under way that have the free blocks still.
        With a host tier requests leave the devices until it has been called.
        """
        count = self._num_given_up(parts)
        if self.residency is None:
            return self._num_spare() < count <= self.num_free()
        self.residency.keep_free(count)
        return self._num_spare() < count

    def ends_making_room(self) -> None:
        """The restore for which `makes_room` was asked is called off."""
        if self.residency is not None:
            self.residency.keep_free(0)

    def _num_given_up(self, parts: Parts) -> int:
        left = self._memory.sizes.num_blocks_left(parts) - 1  # without the null block
        return max(0, self.capacity.num_blocks - left)

    def give_up_blocks(self, parts: Parts) -> list[int]:
        """Leader: withholds as many free blocks as a restore needs, so that the weights that each member has in its
        part find room; their ids.

        Raises:
            StepError: too many are in use.
        """
        count = self._num_given_up(parts)
        self.ends_making_room()
        if count > (num_spare := self._num_spare()):
            raise StepError(f"{count} blocks must be free to bring the weights back, {num_spare} are")
        with self._sparing():
            self._withheld = self.scheduler.withhold(count)
        return list(self._withheld)

    def offer(self, count: int) -> None:
        """Leader: `count` more of the withheld blocks have memory on all members."""
        offered, self._withheld = self._withheld[:count], self._withheld[count:]
        self.scheduler.offer(offered)

    def offer_all(self) -> None:
        """Leader: all blocks have memory on all members."""
        self.offer(len(self._withheld))

    def arrived(self) -> None:
        """Leader: all KV and all memory are there."""
        self.offer_all()
        for request_id, request in self._arriving.items():
            is_parked = request_id in self._arriving_parked
            if self.rows_of(request):
                self.keep_away(request, is_ordered=is_parked)
                continue
            self.scheduler.enqueue(request)
            self.settle(request)
            if is_parked:
                self.keep_parked(request)
        self._arriving, self._arriving_parked = {}, set()
        self.host.may_swap_all()
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
        num_coming = self.residency.prefixes.num_coming if self.residency is not None else 0
        return super().num_requests() + self.num_arriving + num_coming

    @property
    def num_arriving(self) -> int:
        """As of any lane: after a drop."""
        return len(self._arriving)

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
        if request.request_id in self._ids_in_flight():
            raise EngineError(f"request {request.request_id} is in a step still: send it under another id")
        super().add(request)

    def _make_room(self, request: Request, num_computed_tokens: int) -> list[int] | None:
        if request.request_id in self._ids_in_flight():  # it left a moment ago
            return None
        with self._sparing():
            return super()._make_room(request, num_computed_tokens)

    def reserve(self, request: Request, num_tokens: int, num_computed_tokens: int) -> int | None:
        """As of any lane; no microbatch under way has the blocks, nor steps one of the same id."""
        if request.request_id in self._ids_in_flight():
            return None
        with self._sparing():
            return super().reserve(request, num_tokens, num_computed_tokens)

    def enlarge(self, request: Request, num_tokens: int) -> bool:
        """As of any lane; no microbatch under way has the blocks."""
        with self._sparing():
            return super().enlarge(request, num_tokens)

    def served(self, *, must_leave: bool) -> list[Request]:
        """As of any lane, without those whose KV is not all on the devices; where all must leave, these come back."""
        found = super().served(must_leave=must_leave)
        away = [request.request_id for request in found if not self.host.is_here(request)]
        if must_leave and self.residency is not None:
            self.residency.resume(away)
        return [request for request in found if request.request_id not in away]

    def num_written(self, request: Request) -> int:
        """Without what this member's stage has still to write, for microbatches in flight."""
        if is_brought(self._in_flight, self.block_ids(request.request_id)):
            return 0
        num_computed = super().num_written(request)
        return num_computed - num_unwritten(self._in_flight, request.request_id, num_computed)

    def num_moves(self, request: Request) -> int:
        """As of any lane; a request also loses its blocks when its KV goes to the host."""
        return super().num_moves(request) + (self.residency.times_away(request) if self.residency is not None else 0)

    def is_between_steps(self, request: Request) -> bool:
        """Whether no microbatch in flight steps it, or brings KV to a block of it."""
        if request.request_id in self._ids_in_flight():
            return False
        return not is_brought(self._in_flight, self.block_ids(request.request_id))

    def _ids_in_flight(self) -> Set[str]:
        return ids_of(self._in_flight)
