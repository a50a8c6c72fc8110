"""Whether free blocks will do for the next stages, and what goes to the host early if not (LayerKV Eq. 5).

    avail(t + 1)  =  avail(t)  +  released(t)  -  allocated(t)

A stage is what takes each running request one block more: as many steps as a block has tokens. A request ends, and
releases its blocks, in the stage in which it makes as many tokens as the median of what is predicted for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A running request."""

    request_id: str
    num_blocks: int  # it holds on the device
    left_tokens: int  # that it still makes, as the median of its prediction says
    kept_layers: int = 0  # x: layers of it that are on the device and could leave
    started_s: float = 0.0  # when its prompt was computed


def forecast(num_free: int, running: Sequence[Holding], block_size: int, num_stages: int) -> list[int]:
    """Free blocks at the beginning of each of the next `num_stages` stages, the first one's being `num_free`.

    It may fall below 0: so many blocks are missing.
    """
    avail, found = num_free, [num_free]
    for stage in range(num_stages - 1):
        here = [r for r in running if r.left_tokens > stage * block_size]
        ending = [r for r in here if r.left_tokens <= (stage + 1) * block_size]
        released = sum(r.num_blocks + stage + 1 for r in ending)
        avail += released - len(here)
        found.append(avail)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Layers of a request that go to the host early."""

    request_id: str
    num_layers: int


def early_offloads(missing_blocks: float, running: Sequence[Holding], num_layers: int) -> tuple[Offload, ...]:
    """What leaves so that `missing_blocks` become free: of the newest requests first half of what they keep, then all.

    A block is `num_layers` cells, and a layer of a request frees one cell of each of its blocks.
    """
    newest = sorted(running, key=lambda r: (r.started_s, r.request_id), reverse=True)
    missing_cells, away = missing_blocks * num_layers, dict[str, int]()
    for share in (2, 1):
        for request in newest:
            if missing_cells <= 0:
                break
            before = away.get(request.request_id, 0)
            more = -(-request.kept_layers // share) - before
            if more > 0:
                away[request.request_id] = before + more
                missing_cells -= more * request.num_blocks
    return tuple(Offload(request_id=request_id, num_layers=count) for request_id, count in away.items())
