"""What the fast scheduler has: requests in their order, and blocks. Each block is free or held by one request."""

from collections.abc import Collection
from itertools import chain

from pengserve.planners.types.snapshot import KvCapacity
from pengserve.planners.types.units import blocks_for
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.queues import Entry, WaitingQueue
from pengserve.simulator.requests import LiveRequest


class FastState:
    """Who runs, who waits, and what they hold."""

    def __init__(self, capacity: KvCapacity, options: SchedulerOptions) -> None:
        self.capacity, self.options = capacity, options
        self.block_size = capacity.block_size
        self.num_blocks = self.free = capacity.num_blocks
        by_priority = options.policy == "priority"
        self.running: list[Entry] = []
        self.waiting = WaitingQueue(by_priority)  # hold no blocks
        self.holding = WaitingQueue(by_priority)  # came with their KV, and begin before all that wait
        self.entries: dict[LiveRequest, Entry] = {}
        self.num_prefilling = 0  # running requests that do not decode yet
        self.num_preempted = 0
        self.watermark_blocks = int(options.watermark * (capacity.num_blocks + 1))  # vLLM counts its null block
        self._host_free = options.host_blocks
        self._lives: tuple[LiveRequest, ...] | None = None

    @property
    def lives(self) -> tuple[LiveRequest, ...]:
        """Of `running`; the same object until it changes."""
        if self._lives is None:
            self._lives = tuple([entry.live for entry in self.running])
        return self._lives

    # Who is next -----------------------------------------------------------------------------------------------------

    def next_queue(self) -> WaitingQueue | None:
        """The queue whose head begins next, if blocks are free for it; None where no request waits or may run."""
        queue = self.holding or self.waiting
        return queue if queue and len(self.running) < self.capacity.max_num_seqs else None

    def blocks_to_begin(self, entry: Entry) -> int:
        """Blocks that must be free before a waiting request begins: for all it has, not only for its first chunk."""
        watermark = self.watermark_blocks if self.running else 0
        return max(0, blocks_for(entry.tokens, self.block_size) - entry.blocks) + watermark

    def begin(self, entry: Entry, num_tokens: int) -> int:
        """The head of a queue, taken out of it, runs and computes so many tokens; blocks that come from the host."""
        swapped_in = entry.host_blocks
        self._forget_host(entry)
        self.take(entry, max(0, blocks_for(entry.computed + num_tokens, self.block_size) - entry.blocks))
        self.running.append(entry)
        self._lives = None
        self.num_prefilling += 1
        return swapped_in

    def decode_first(self) -> None:
        """As `SchedulerHandle.decode_first`, where any running request does not decode."""
        if any(entry.tokens - entry.computed > 1 for entry in self.running):
            self.running.sort(key=lambda entry: (entry.tokens - entry.computed > 1, entry.live.arrival.priority))
            self._lives = None

    # Who goes --------------------------------------------------------------------------------------------------------

    def victim(self) -> int:
        """Index of the running request that is preempted next: the newest, or the least urgent."""
        if self.options.policy == "priority":
            return self.running.index(max(self.running, key=lambda entry: entry.order[:2]))
        return len(self.running) - 1

    def preempt(self, index: int) -> Entry:
        """Takes all blocks from a running request, which waits from now on."""
        entry = self.running.pop(index)
        self._lives = None
        self.num_prefilling -= not entry.is_decoding
        entry.is_decoding = False
        if not self._swap_out(entry):
            entry.computed = 0
        entry.stale = entry.in_flight
        entry.preemptions += 1
        self._wait_again(entry)
        return entry

    def give_up(self) -> list[Entry]:
        """Where requests that came with their KV leave no block for any of them, one computes again; that one, if any.

        As `GroupLane` does in production.
        """
        if self.running or not self.holding:
            return []
        entry = self.holding.pop()
        entry.computed = 0
        self._wait_again(entry)
        return [entry]

    def _wait_again(self, entry: Entry) -> None:
        entry.live.num_preemptions += 1
        self.num_preempted += 1
        self._release(entry)
        self.waiting.prepend(entry)

    def let_go(self, entries: Collection[Entry]) -> None:
        """Requests that have ended, or go elsewhere, running or waiting."""
        if not entries:
            return
        gone = set(entries)
        for entry in entries:
            del self.entries[entry.live]
            self._release(entry)
            self._forget_host(entry)
        left = [entry for entry in self.running if entry not in gone]
        if len(left) < len(self.running):
            self.num_prefilling -= sum(not entry.is_decoding for entry in self.running if entry in gone)
            self.running, self._lives = left, None
        if len(self.running) + len(self.waiting) + len(self.holding) > len(self.entries):
            self.waiting.remove(gone)
            self.holding.remove(gone)

    # Blocks ----------------------------------------------------------------------------------------------------------

    def take(self, entry: Entry, blocks: int) -> None:
        """Gives free blocks to a request."""
        assert blocks <= self.free, "a scheduler gave away what it has not"
        entry.blocks += blocks
        entry.room = entry.blocks * self.block_size
        self.free -= blocks

    def resize(self, num_blocks: int) -> bool:
        """Sets the number of KV blocks; False, and nothing is changed, where more are in use."""
        used = self.num_blocks - self.free
        if num_blocks < used:
            return False
        self.num_blocks, self.free = num_blocks, num_blocks - used
        return True

    def holders(self) -> list[LiveRequest]:
        """Requests that hold blocks, in the order in which they are scheduled."""
        return [entry.live for entry in chain(self.running, self.holding)]

    def _release(self, entry: Entry) -> None:
        self.free += entry.blocks
        entry.blocks = entry.room = 0

    def _swap_out(self, entry: Entry) -> bool:
        """Gives a request's KV a place on the host; False where there is none, or a step of it is unfinished."""
        blocks = blocks_for(entry.computed, self.block_size) if self.options.preemption == "swap" else 0
        if entry.in_flight or not blocks or (self._host_free is not None and blocks > self._host_free):
            return False
        if self._host_free is not None:
            self._host_free -= blocks
        entry.host_blocks = blocks
        return True

    def _forget_host(self, entry: Entry) -> None:
        if self._host_free is not None:
            self._host_free += entry.host_blocks
        entry.host_blocks = 0
