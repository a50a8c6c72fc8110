"""KV of two tiers while the device's memory changes hands: before, blocks stand still; after, others take their place.

    stand_still   what is to survive is in one place in all layers
    hold          KV is to come to blocks, or is there already: nothing else touches them before `let_go`
    vacate        memory of the device is about to go: what is there moves below it, or to the host

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


def hold(tiers: TieredKv, blocks: np.ndarray, columns: np.ndarray) -> list[BlockPlace]:
    """Places of blocks that have none: these indices in all layers, and the host's rows where an index is 0. Nothing
    else touches them before `let_go`.

    Raises:
        EngineError: the host has too few rows.
    """
    placement, here = tiers.placement, columns != 0
    placement.hold_columns(blocks[here], columns[here])
    away = blocks[~here]
    if len(placement.take_rows(away)) < len(away):
        raise EngineError(f"the host has no room for KV of {len(away)} blocks that come")
    tiers.host.clear(placement.row[away])  # a block that fills in part: see `Room.claim`
    placement.on_host[:, away] = True
    tiers.traffic.expect(blocks)
    rows = np.where(here, NO_ROW, placement.row[blocks])
    return [BlockPlace(*place) for place in zip(columns.tolist(), rows.tolist(), strict=True)]


def let_go(tiers: TieredKv, blocks: np.ndarray) -> None:
    """The KV of these blocks has come."""
    tiers.traffic.arrived(blocks)
    tiers.touch(blocks)


@torch.inference_mode()
def vacate(tiers: TieredKv, num_columns: int) -> None:
    """No cell of the device is in use at an index from `num_columns` on of any layer's own. No step is under way.

    Raises:
        EngineError: device and host have too little room. Some blocks may have moved.
    """
    placement, pool = tiers.placement, tiers.pool
    tiers.traffic.cancel(tiers.traffic.copies())
    placement.resize(num_columns)
    tiers.room.make_room(sum(map(len, placement.strangers(num_columns))), NONE)
    tiers.traffic.cancel(tiers.traffic.copies())  # that went beside: they read cells that go
    leaving = placement.strangers(num_columns)
    together = [block for block in leaving[0] if placement.is_uniform[block]]
    columns = placement.free_columns()[: len(together)]
    for block, column in zip(together, columns, strict=False):
        _move(tiers, block, column)
    for layer, blocks in enumerate(placement.strangers(num_columns)):
        if len(blocks) > placement.num_free:
            raise EngineError(f"KV of {len(blocks)} blocks finds no room below {num_columns}")
        data = pool.cells[torch.from_numpy(placement.cells(layer, blocks))]
        placement.drop(layer, blocks)
        cells = placement.take(len(blocks))
        pool.cells[torch.from_numpy(cells)] = data
        placement.put(layer, blocks, cells)


def _move(tiers: TieredKv, block: int, column: int) -> None:
    """A block that has one index in all layers gets another."""
    placement, cells, found = tiers.placement, tiers.pool.cells, np.array([block])
    sources = [placement.cells(layer, found) for layer in placement.layers]
    data = cells[torch.from_numpy(np.concatenate(sources))]
    placement.drop_all(found)
    placement.hold_columns(found, np.array([column]))
    targets = [placement.cells(layer, found) for layer in placement.layers]
    cells[torch.from_numpy(np.concatenate(targets))] = data
