"""Cached prefixes of a pipeline that its devices have no room for: the host keeps them for a conversation's next turn.

    a free block with a cached prefix is handed out ──> its KV goes to a stage row, before the microbatch that writes it
    a new request begins with what rows hold        ──> it gets blocks, and its KV comes beside the steps of others
    its KV is there on all members                  ──> it waits for its slot, with so many tokens computed

Full blocks never change, so a row is valid for as long as it is kept: until its room is needed, the least recently used
first. Members read and overwrite rows in the order in which the leader says so.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.tiers.swap_queue import SwapQueue
from pengserve.replicas.engine.vllm_seam import Request, RequestStatus
from pengserve.replicas.kv.room import TierCounts
from pengserve.replicas.memory.arena.free_chunks import FreeChunks

_MAY_BEGIN = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class HostPrefixes:
    """Of a pipeline's leader."""

    def __init__(
        self, scheduler: SchedulerHandle, free_rows: Callable[[], FreeChunks], queue: SwapQueue, counts: TierCounts
    ) -> None:
        """`free_rows`: stage rows that nothing is in, which others take from too."""
        self._scheduler, self._free_rows, self._queue, self._counts = scheduler, free_rows, queue, counts
        self._block_size = scheduler.block_size
        self._rows: OrderedDict[bytes, int] = OrderedDict()  # by hash of a block, which names all tokens up to its end
        self._reading: dict[bytes, int] = {}  # of them, those that a request is about to get
        self._coming: dict[str, tuple[Request, int]] = {}  # new requests, each with the swap-in that it waits for
        self._is_saving = False
        self.is_closed = False  # memory is about to move, which waits for copies: no prefix goes or comes
        scheduler.watch_evictions(self._evicted)

    def __len__(self) -> int:
        """Rows that prefixes have."""
        return len(self._rows)

    @property
    def rows(self) -> list[int]:
        """Those."""
        return list(self._rows.values())

    def clear(self) -> None:
        """The pipeline has ended."""
        self._rows.clear()
        self._coming.clear()
        self.is_closed = False

    # Rows -------------------------------------------------------------------------------------------------------------

    def give_up(self, count: int) -> None:
        """Frees so many rows, as far as prefixes have some, the least recently used first."""
        rows = [self._rows.popitem(last=False)[1] for _ in range(min(count, len(self._rows)))]
        self._free_rows().give(rows)

    def adopt(self, request: Request, rows: Sequence[int], num_tokens: int) -> list[int]:
        """A request has ended of which these rows have so many tokens' KV; the rows that are of no use."""
        left = list(rows[num_tokens // self._block_size :])
        for block_hash, row in zip(request.block_hashes, rows[: num_tokens // self._block_size], strict=False):
            if self._rows.setdefault(block_hash, row) != row:
                left.append(row)
            self._rows.move_to_end(block_hash)
        return left

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Within it, blocks are handed out that microbatches alone write, after what is queued."""
        before, self._is_saving = self._is_saving, True
        try:
            yield
        finally:
            self._is_saving = before

    def _evicted(self, block: int, block_hash: bytes) -> None:
        if not self._is_saving or self.is_closed or block_hash in self._reading:
            return
        if block_hash in self._rows:
            self._counts.reused += 1
        else:
            if not len(self._free_rows()):
                self.give_up(1)
            if not len(self._free_rows()):
                return
            row = self._free_rows().take(1)
            self._rows[block_hash] = row[0]
            self._queue.save([block], row)
        self._rows.move_to_end(block_hash)

    # Requests that begin with them ------------------------------------------------------------------------------------

    @property
    def num_coming(self) -> int:
        """New requests whose prefix is on its way."""
        return len(self._coming)

    def go_on(self, *, is_alone: bool) -> None:
        """New requests whose prefix is there may be scheduled.

        Args:
            is_alone: nothing else is to step: they do not wait, and the step does.
        """
        for request_id, (request, number) in list(self._coming.items()):
            is_here = self._scheduler.knows(request_id) and self._scheduler.request(request_id) is request
            if is_here and number > self._queue.num_come and not is_alone:
                continue
            del self._coming[request_id]
            if is_here:
                self._scheduler.enqueue(request)

    def begin(self, num_free: int, may_begin: Callable[[Request], bool]) -> None:
        """New requests at the head of the queue get what rows have of them, while `num_free` blocks hold each whole."""
        scheduler = self._scheduler
        if not self._rows or self.is_closed or not scheduler.takes_new:
            return
        for request in scheduler.first_waiting(scheduler.new_slots - len(self._coming)):
            num_free -= -(-request.num_tokens // self._block_size) + 1
            if num_free < 0:
                return
            if request.status in _MAY_BEGIN and not request.skip_reading_prefix_cache and may_begin(request):
                self._begin(request)

    def _begin(self, request: Request) -> None:
        last = (request.num_tokens - 1) // self._block_size  # a token at least is computed
        hashes = request.block_hashes[:last]
        if not any(block_hash in self._rows for block_hash in hashes):
            return
        first = self._scheduler.cached_tokens(request) // self._block_size
        found = list(self._until_missing(hashes[first:]))
        if not found:
            return
        self._reading = {block_hash: self._rows.pop(block_hash) for block_hash in found}
        num_tokens = (first + len(found)) * self._block_size
        with self.saving():
            num_cached = self._scheduler.reserve_prefix(request, num_tokens)
        if num_cached is not None:
            assert num_cached == first * self._block_size
            blocks = self._scheduler.block_ids(request.request_id)[first : first + len(found)]
            number = self._queue.bring(blocks, list(self._reading.values()))
            self._scheduler.cache(request)
            self._coming[request.request_id] = request, number
            self._counts.hit_tokens += len(found) * self._block_size
        self._rows.update(self._reading)
        self._reading = {}

    def _until_missing(self, hashes: Sequence[bytes]) -> Iterator[bytes]:
        for block_hash in hashes:
            if block_hash not in self._rows:
                return
            yield block_hash
