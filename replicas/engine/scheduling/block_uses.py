"""What the blocks of a vLLM pool are used for, looked at again only where that may have changed.

A pool has as many blocks as device and host hold, and a step that makes room asks about all of them. Few of them change
between two steps, so vLLM's calls that change one are noted:

    get_new_blocks, touch    a request has the block from now on
    free_blocks              a request has it no longer
    evict_blocks             its prefix is forgotten
    reset_prefix_cache       all prefixes are
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pengserve.replicas.engine.vllm_seam import KVCacheBlock
from pengserve.replicas.kv.placement import Use


class BlockUses:
    """Of one pool, from now on. Belongs to the thread that steps."""

    def __init__(self, pool: Any) -> None:
        """`pool`: vLLM's `BlockPool`. It may grow, and never shrinks."""
        self._pool = pool
        self._uses = np.zeros(0, dtype=np.uint8)
        self._changed: set[int] = set()  # blocks to look at; those that are new to the pool come beside them
        self._watch(pool)

    def __call__(self) -> np.ndarray:
        """A `Use` of each block, uint8 `[num_blocks]`; the caller's own."""
        blocks, num_known = self._pool.blocks, len(self._uses)
        if len(blocks) > num_known:
            self._uses = np.concatenate([self._uses, np.zeros(len(blocks) - num_known, dtype=np.uint8)])
            self._changed.update(range(num_known, len(blocks)))
        if self._changed:
            changed = list(self._changed)
            self._uses[changed] = [_use(blocks[block_id]) for block_id in changed]
            self._changed.clear()
        return self._uses.copy()

    def _note(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._changed.update([block.block_id for block in blocks])

    def _watch(self, pool: Any) -> None:
        get_new, touch, free = pool.get_new_blocks, pool.touch, pool.free_blocks
        evict, reset = pool.evict_blocks, pool.reset_prefix_cache

        def get_new_blocks(num_blocks: int) -> list[KVCacheBlock]:
            found: list[KVCacheBlock] = get_new(num_blocks)
            self._note(found)
            return found

        def touch_blocks(blocks: Sequence[KVCacheBlock]) -> None:
            self._note(blocks)
            touch(blocks)

        def free_blocks(ordered_blocks: Iterable[KVCacheBlock]) -> None:
            blocks = list(ordered_blocks)
            self._note(blocks)
            free(blocks)

        def evict_blocks(block_ids: set[int]) -> None:
            self._changed.update(block_ids)
            evict(block_ids)

        def reset_prefix_cache() -> bool:
            self._changed.update(range(len(self._uses)))
            return bool(reset())

        pool.get_new_blocks, pool.touch, pool.free_blocks = get_new_blocks, touch_blocks, free_blocks
        pool.evict_blocks, pool.reset_prefix_cache = evict_blocks, reset_prefix_cache


_HELD, _CACHED, _DEAD = int(Use.HELD), int(Use.CACHED), int(Use.DEAD)


def _use(block: KVCacheBlock) -> int:
    if block.ref_cnt:
        return _HELD
    return _DEAD if block.block_hash is None else _CACHED
