"""How fast KV goes from one process to another while nothing else runs: blocks are read, sent, received and written.

The two ends are what migrations use: `Transfers`, `PeerChannel`, `PartRows`, one connection. `python -m
benchmarks.migrate.link --room SHAPE` is the end that receives.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pengserve.planners.types.directory import PeerAddress
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.replicas.comm.peers import PeerNetwork
from pengserve.replicas.kv.channel import PeerChannel
from pengserve.replicas.kv.ledger import CellLedger
from pengserve.replicas.kv.rows import PartRows
from pengserve.replicas.kv.transfer import Segment, TransferPlan
from pengserve.replicas.kv.transfers import Transfers
from pengserve.replicas.memory.kv_views import BlockLayout, KvView

SENDER, RECEIVER = 0, 1
TIMEOUT_S = 60.0
PIECE_S = 0.005  # of sending at a time, as beside steps of so long
NUM_ROUNDS = 7  # the first two warm up


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """The KV of some blocks, in float32."""

    num_blocks: int
    num_layers: int
    num_heads: int
    num_tokens: int  # of a block
    head_size: int

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return 8 * self.num_blocks * self.num_layers * self.num_heads * self.num_tokens * self.head_size


def shape_of(model: Path, engine: Mapping[str, Any], num_bytes: int) -> KvShape:
    """Blocks of this model's KV that have about so many bytes."""
    config = json.loads((model / "config.json").read_text())
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    one = KvShape(
        num_blocks=1,
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_key_value_heads"],
        num_tokens=engine["block_size"],
        head_size=head_size,
    )
    return KvShape(**asdict(one) | {"num_blocks": max(1, num_bytes // one.num_bytes)})


class _End:
    """One of the two processes."""

    def __init__(self, shape: KvShape, rank: int) -> None:
        torch.set_num_threads(1)
        self.shape, self.rank = shape, rank
        elements = torch.arange(2 * shape.num_heads * shape.num_tokens * shape.head_size)
        place = elements.view(shape.num_heads, shape.num_tokens, 2, shape.head_size).permute(2, 1, 0, 3).contiguous()
        layers = [torch.zeros(shape.num_blocks + 1, len(elements)) for _ in range(shape.num_layers)]
        self._view = KvView(layers, BlockLayout(place))
        self._transfers = Transfers(CellLedger(shape.num_blocks + 1, "dp"))
        self.heard = threading.Event()
        key = InstanceKey(instance_id=InstanceId(rank), incarnation=0)
        self.network = PeerNetwork(key, "127.0.0.1", "benchmark", self._on_message, lambda key: None, TIMEOUT_S)
        self._other = InstanceKey(instance_id=InstanceId(1 - rank), incarnation=0)
        if rank == RECEIVER:
            self._expect()

    def connect(self, endpoint: str) -> None:
        self.network.connect([PeerAddress(key=self._other, endpoint=endpoint)], TIMEOUT_S)

    def _segment(self) -> Segment:
        shape, blocks = self.shape, range(1, self.shape.num_blocks + 1)
        tiles = self._view.tiles([(blocks, shape.num_blocks * shape.num_tokens)], shape.num_tokens)
        return Segment(1 - self.rank, 0, PartRows(self._view, tiles, (0, shape.num_heads), 0))

    def _expect(self) -> None:
        plan = TransferPlan(
            lane="dp", what="KV", rank=self.rank, outgoing=(), incoming=[self._segment()], on_done=self._written
        )
        self._coming = self._transfers.submit(plan, PeerChannel(lambda *_: None))
        self._coming.advance(0.0)

    def _written(self) -> None:
        self.network.send(self._other, "written", [])
        self._expect()

    def _on_message(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        if kind == "kv":
            self._coming.receive(SENDER, parts)
        else:
            self.heard.set()

    def send_all(self) -> float:
        """Seconds until all blocks are written at the other end."""
        self.heard.clear()
        started_s = time.perf_counter()
        plan = TransferPlan(lane="dp", what="KV", rank=self.rank, outgoing=[self._segment()], incoming=())
        channel = PeerChannel(lambda _, parts: self.network.send(self._other, "kv", parts))
        self._transfers.submit(plan, channel)
        while self._transfers.is_busy:
            self._transfers.advance(PIECE_S)
        if not self.heard.wait(TIMEOUT_S):
            raise SystemExit("the process that receives died; its error is above")
        return time.perf_counter() - started_s


def bytes_per_s(shape: KvShape) -> float:
    """The median rate of several rounds."""
    command = [sys.executable, "-m", "benchmarks.migrate.link", "--room", json.dumps(asdict(shape))]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    end = _End(shape, SENDER)
    try:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(end.network.endpoint + "\n")
        child.stdin.flush()
        end.connect(child.stdout.readline().strip())
        times = sorted([end.send_all() for _ in range(NUM_ROUNDS)][2:])
        return shape.num_bytes / times[len(times) // 2]
    finally:
        end.network.close()
        child.kill()
        child.wait()


def main() -> None:
    """The end that receives, until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--room", required=True, help="a KvShape as JSON")
    end = _End(KvShape(**json.loads(parser.parse_args().room)), RECEIVER)
    sys.stdout.write(end.network.endpoint + "\n")
    sys.stdout.flush()
    end.connect(sys.stdin.readline().strip())
    threading.Event().wait()


if __name__ == "__main__":
    main()
