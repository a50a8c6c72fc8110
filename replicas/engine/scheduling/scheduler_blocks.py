"""Blocks of a vLLM scheduler's pool: who holds them, which prefixes they cache, and which the scheduler may hand out.

The part of `SchedulerHandle` (`scheduler_handle.py`) that knows no step.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pengserve.replicas.engine.scheduling.block_groups import blocks_of
from pengserve.replicas.engine.scheduling.block_uses import BlockUses
from pengserve.replicas.engine.vllm_seam import KVCacheBlock, Request


class SchedulerBlocks:
    """Belongs to the thread that steps."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._manager: Any = scheduler.kv_cache_manager
        self._pool: Any = scheduler.kv_cache_manager.block_pool
        self._uses: BlockUses | None = None
        self._num_given_up = 0  # blocks that are never handed out again

    def block_ids(self, request_id: str) -> list[int]:
        """Blocks of a request, in the order of its tokens."""
        return list(blocks_of(self._manager.get_block_ids(request_id)))

    def num_blocks_of(self, request_id: str) -> int:
        """How many blocks a request has."""
        return len(blocks_of(self._manager.get_blocks(request_id).blocks))

    def num_free(self) -> int:
        """Blocks that are free now, cached prefixes among them."""
        return int(self._pool.get_num_free_blocks())

    @property
    def watermark_blocks(self) -> int:
        """Blocks that must stay free when a request begins beside others."""
        return int(self._manager.watermark_blocks)

    def withhold(self, count: int) -> list[int]:
        """Takes `count` free blocks away, the least recently used first; their ids. What they cached is forgotten.

        Raises:
            ValueError: there are not so many.
        """
        return [block.block_id for block in self._pool.get_new_blocks(count)]

    def offer(self, block_ids: Sequence[int]) -> None:
        """Gives blocks back that were withheld, as free ones without content."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])

    def keep_only(self, num_blocks: int) -> None:
        """Blocks from `num_blocks` on, which are all free, are never handed out again. No prefix is cached any more."""
        self._forget_cached()
        given_up = self._pool.blocks[num_blocks:]
        self._pool.touch(given_up)
        self._num_given_up = len(given_up)

    def _forget_cached(self) -> None:
        self._pool.evict_blocks({block.block_id for block in self._pool.blocks if not block.is_null})

    def pin(self, hashes: Iterable[Any]) -> list[int]:
        """Holds the cached blocks of a prefix, given by the hashes of its blocks, as a request would; their ids."""
        held: list[KVCacheBlock] = []
        for block_hash in hashes:
            if (found := self._pool.get_cached_block(block_hash, [0])) is None:
                break
            held += found
        self._pool.touch(held)
        return [block.block_id for block in held]

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Inverse of `pin`. Blocks stay cached; the end of the prefix is handed out first."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])

    def watch_frees(self, on_freed: Callable[[str], None]) -> None:
        """Calls `on_freed(request_id)` before a request loses its blocks: by its end, preemption, or parking."""
        free = self._manager.free

        def watched(request: Request) -> None:
            on_freed(request.request_id)
            free(request)

        self._manager.free = watched

    @contextlib.contextmanager
    def sparing(self, block_ids: Iterable[int]) -> Iterator[None]:
        """Within it none of these blocks is handed out. A request that begins with what one caches may share it."""
        free = [block for block in (self._pool.blocks[i] for i in block_ids) if not block.ref_cnt]
        self._pool.touch(free)
        try:
            yield
        finally:
            self._pool.free_blocks(free)

    def num_held_alone(self, holds: Mapping[int, int]) -> int:
        """Of these blocks, those that are held only as often as given."""
        return sum(self._pool.blocks[block_id].ref_cnt == count for block_id, count in holds.items())

    @property
    def num_blocks(self) -> int:
        """All blocks of the pool, vLLM's null block among them."""
        return len(self._pool.blocks)

    def uses(self) -> np.ndarray:
        """What each block is used for: a `Use` each, uint8 `[num_blocks]`."""
        if self._uses is None:  # vLLM's calls are watched where there is a host tier alone
            self._uses = BlockUses(self._pool)
        return self._uses()

    def extend(self, count: int) -> list[int]:
        """Makes `count` new blocks, which are withheld; their ids."""
        first = len(self._pool.blocks)
        self._pool.blocks.extend(KVCacheBlock(first + i, ref_cnt=1, pool=self._pool) for i in range(count))
        self._pool.num_gpu_blocks += count
        return list(range(first, first + count))

    def blocks_freed(self, request_ids: Sequence[str]) -> dict[str, tuple[int, list[int]]]:
        """The blocks that become free when requests release theirs, by request.

        First the number of blocks that only this request holds. Then the ids of blocks that become free once all of
        `request_ids` that share them have ended. Blocks that other requests hold too are in neither.
        """
        found = {request_id: blocks_of(self._manager.get_blocks(request_id).blocks) for request_id in request_ids}
        held = {request_id: [b for b in blocks if not b.is_null] for request_id, blocks in found.items()}
        holders = Counter(block.block_id for blocks in held.values() for block in blocks)
        return {
            request_id: (
                sum(block.ref_cnt == 1 for block in blocks),
                [block.block_id for block in blocks if 1 < block.ref_cnt == holders[block.block_id]],
            )
            for request_id, blocks in held.items()
        }

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False while requests hold blocks."""
        if not self._num_given_up:
            return bool(self._scheduler.reset_prefix_cache())
        is_empty = self.num_free() + self._num_given_up + 1 == self.num_blocks
        if is_empty:
            self._forget_cached()
        return is_empty
