"""KV of two tiers while the device's memory changes hands: before, blocks stand still; after, others take their place.

In a pipeline an instance has no cells of its own for `dp`: dropped layers lend their memory to others. So what is to
survive is in one column of all layers, which stays where it is in the layers that are kept, or on the host.
"""

import numpy as np
import torch

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.kv.copies import Priority
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.kv.tiered_rows import NO_ROW, BlockPlace

NONE = np.zeros(0, dtype=np.int64)


@torch.inference_mode()
def stand_still(tiers: TieredKv, blocks: np.ndarray, leaving: np.ndarray = NONE) -> dict[int, BlockPlace]:
    """Where each of these blocks is, in all layers alike. What others hold is forgotten, and no copy is under way.

    Args:
        leaving: those of them that are to be on the host.

    Raises:
        EngineError: a copy failed.
    """
    placement, pool, room = tiers.placement, tiers.pool, tiers.room
    tiers.traffic.cancel(tiers.traffic.copies())
    blocks = np.unique(blocks)
    tiers.forget(np.setdiff1d(np.arange(1, placement.num_blocks), blocks))
    is_column = placement.is_uniform[blocks] & (placement.index[0, blocks] < pool.num_blocks)
    moving = blocks[~is_column | np.isin(blocks, leaving)]
    saved = placement.take_rows(moving)
    room.save([saved] * pool.num_layers, Priority.EVICT)
    placement.drop_all(saved)
    left = np.setdiff1d(moving, saved)  # the host is full: these have cells, here and there
    data = [pool.cells[torch.from_numpy(placement.cells(layer, left))] for layer in range(pool.num_layers)]
    placement.drop_all(left)
    if len(placement.settle_at_home(left)):
        raise EngineError(f"{len(left)} blocks of KV find no place in one column of all layers")
    for layer, bytes_ in enumerate(data):
        pool.cells[torch.from_numpy(placement.cells(layer, left))] = bytes_
    return places(tiers, blocks)


def places(tiers: TieredKv, blocks: np.ndarray) -> dict[int, BlockPlace]:
    """Where blocks are that are in one place in all layers.

    Raises:
        EngineError: one is not.
    """
    placement = tiers.placement
    here = placement.index[0, blocks] != 0
    is_whole = np.where(here, placement.is_uniform[blocks], placement.on_host[:, blocks].all(axis=0))
    if not is_whole.all():
        raise EngineError(f"KV of {int((~is_whole).sum())} blocks is not in one place in all layers")
    columns, rows = placement.index[0, blocks], np.where(here, NO_ROW, placement.row[blocks])
    found = zip(columns.tolist(), rows.tolist(), strict=True)
    return dict(zip(blocks.tolist(), (BlockPlace(*place) for place in found), strict=True))
