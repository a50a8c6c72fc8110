"""Rows of tiles: bytes of a peer are on the host, the KV they are written to may be on a device."""

import torch

from pengserve.replicas.kv.rows import PartRows, TileRows
from pengserve.replicas.memory.kv_views import BlockLayout, KvView, Tiles

HEADS, TOKENS, DIM = 2, 4, 8


class ViewOnDevice(KvView):
    """KV on a device without memory: what is written is remembered."""

    def __init__(self) -> None:
        place = torch.arange(2 * TOKENS * HEADS * DIM).view(2, TOKENS, HEADS, DIM)
        super().__init__([torch.empty(8, 2 * TOKENS * HEADS * DIM, device="meta")], BlockLayout(place))
        self.written: list[torch.Tensor] = []

    def write(self, tiles: Tiles, data: torch.Tensor, heads: tuple[int, int]) -> None:
        self.written.append(data)


def test_bytes_of_a_peer_are_brought_to_the_device_of_the_kv() -> None:
    """Seen on a GPU: a migration's first piece was refused, for it was on the host."""
    view = ViewOnDevice()
    tiles = view.tiles([([1, 2], 2 * TOKENS)], TOKENS)
    part = PartRows(view, tiles, (0, HEADS), 0)
    part.write(0, torch.zeros(2 * part.row_bytes, dtype=torch.uint8))
    whole = TileRows(view, HEADS, 2, TOKENS).bind(view, [([1, 2], 2 * TOKENS)], (0, HEADS))
    whole.write(0, torch.zeros(2 * whole.row_bytes, dtype=torch.uint8))
    assert [data.device.type for data in view.written] == ["meta", "meta"]
    assert [data.shape for data in view.written] == [view.shape(HEADS, 2, TOKENS)] * 2
