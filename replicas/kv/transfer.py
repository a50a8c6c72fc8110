"""One plan of bytes to move, and how far it is."""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.kv.channel import Channel, Piece, read_header
from pengserve.replicas.kv.ledger import CellLedger, Cells
from pengserve.replicas.kv.pacing import Pace
from pengserve.replicas.kv.rows import Rows


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that go between this member and the one of rank `peer`, or within this member where that is its own rank.

    The layer names the segment between the two: a plan has one at most for each peer, layer and direction.
    """

    peer: int
    layer: int
    rows: Rows
    round: int = 0  # segments of a lower one go first; over a communicator all members have the same


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """What one member sends and gets. Callbacks come in the step thread, and may submit or cancel."""

    lane: str  # on whose behalf
    what: str  # "KV" or "weights", for messages
    rank: int  # of this member
    outgoing: Sequence[Segment]
    incoming: Sequence[Segment]
    on_sent: Callable[[int], None] = lambda layer: None  # no more bytes of this layer leave
    on_layer: Callable[[int], None] = lambda layer: None  # all that comes for this layer is written
    on_done: Callable[[], None] = lambda: None
    on_failed: Callable[[Exception], None] | None = None

    @property
    def sent_bytes(self) -> int:
        """That go to other members."""
        return sum(s.rows.num_rows * s.rows.row_bytes for s in self.outgoing if s.peer != self.rank)


@dataclass(slots=True, eq=False)
class _Flow:
    """One segment, and how far it is."""

    segment: Segment
    cells: Cells  # in flight until it has ended
    num_moved: int = 0  # rows that have left, or have come
    num_written: int = 0

    @property
    def num_left(self) -> int:
        return self.segment.rows.num_rows - self.num_moved


_Waiting = tuple[_Flow, int, torch.Tensor]
"""Bytes of rows from a number on, which have come before there is memory for them."""


class Transfer:
    """A plan under way, on one member. `Transfers` makes it."""

    def __init__(
        self,
        plan: TransferPlan,
        channel: Channel,
        ledger: CellLedger,
        on_end: Callable[["Transfer"], None],
        pace: Pace | None = None,
    ) -> None:
        self.plan = plan
        self.is_done = False
        self._channel, self._ledger, self._on_end = channel, ledger, on_end
        self._is_new, self._is_over = True, False
        outgoing = sorted(plan.outgoing, key=lambda segment: segment.round)
        self._outgoing = deque(_Flow(segment, segment.rows.cells) for segment in outgoing)
        coming = [segment for segment in plan.incoming if segment.rows.num_rows]
        self._incoming = {(s.peer, s.layer): _Flow(s, s.rows.cells) for s in coming}
        if len(self._incoming) < len(coming):
            raise ValueError(
                f"two segments of {plan.what} come from one member for one layer: nothing tells them apart"
            )
        self._unsent = Counter(segment.layer for segment in plan.outgoing)  # segments by layer
        self._unwritten = Counter(segment.layer for segment in coming)
        self._waiting: list[_Waiting] = []
        self._pace = pace or Pace()

    def begin(self) -> None:
        """All its cells are in flight. Raises ValueError, and nothing has changed, where others are in the way."""
        for flow in self._incoming.values():
            if found := self._ledger.conflicts(flow.cells):
                raise ValueError(f"blocks {found} of layer {flow.segment.layer} are in flight and cannot be written")
        for flow in self._outgoing:
            if found := self._ledger.conflicts(flow.cells, with_reads=False):
                raise ValueError(f"blocks {found} of layer {flow.segment.layer} are being written and cannot be read")
        for flow in self._incoming.values():
            self._ledger.begin_copy(flow.cells, writes=True)
        for flow in self._outgoing:
            self._ledger.begin_copy(flow.cells, writes=False)

    # Out --------------------------------------------------------------------------------------------------------------

    @property
    def is_sending(self) -> bool:
        """Whether `advance` has something to do."""
        return not self._is_over and (self._is_new or bool(self._outgoing))

    @torch.inference_mode()
    def advance(self, budget_s: float) -> None:
        """Sends one piece, of about `budget_s` seconds.

        Raises:
            EngineError: the other member is gone.
        """
        self._is_new = False
        if self._outgoing:
            flow = self._outgoing[0]
            rows, started_s = flow.segment.rows, time.perf_counter()
            most = max(1, min(self._pace.num_bytes, self._channel.most_bytes) // rows.row_bytes)
            count = min(flow.num_left, most)
            self._send(flow, count)
            took_s = time.perf_counter() - started_s
            if 4 * count >= most or took_s > budget_s:  # a small piece that fits into the link's buffer says little
                self._pace.took(count * rows.row_bytes, took_s, budget_s)
            if not flow.num_left:
                self._outgoing.popleft()
                self._sent(flow)
        self._finish()

    @torch.inference_mode()
    def run(self) -> None:
        """Sends and receives everything, a round after the other, together with the other members.

        Raises:
            EngineError: a member is gone.
        """
        self._is_new = False
        coming = list(self._incoming.values())
        for number in sorted({flow.segment.round for flow in (*self._outgoing, *coming)}):
            self._run_round(number, [flow for flow in coming if flow.segment.round == number])
        self._finish()

    def _run_round(self, number: int, coming: Sequence[_Flow]) -> None:
        own, leaving = self.plan.rank, [flow for flow in self._outgoing if flow.segment.round == number]
        pieces = [self._piece(flow, flow.num_left) for flow in leaving if flow.num_left]
        rooms = [self._room(flow) for flow in coming if flow.segment.peer != own]
        self._channel.move([piece for piece in pieces if piece.peer != own], rooms)
        for piece in (*(piece for piece in pieces if piece.peer == own), *rooms):
            self._take(self._incoming[piece.peer, piece.layer], 0, piece.data)
        for flow in leaving:
            self._outgoing.popleft()
            self._sent(flow)

    @torch.inference_mode()
    def hurry(self, layer: int) -> None:
        """Makes all copies within this member that bring KV of `layer`."""
        mine = [f for f in self._outgoing if (f.segment.peer, f.segment.layer) == (self.plan.rank, layer)]
        for flow in mine:
            self._send(flow, flow.num_left)
            self._outgoing.remove(flow)
            self._sent(flow)
        self._finish()

    def _send(self, flow: _Flow, count: int) -> None:
        if not count:
            return
        piece = self._piece(flow, count)
        if piece.peer == self.plan.rank:
            self._take(self._incoming[piece.peer, piece.layer], piece.first, piece.data)
        else:
            self._channel.move([piece], [])
        flow.num_moved += count

    def _piece(self, flow: _Flow, count: int) -> Piece:
        segment, first = flow.segment, flow.num_moved
        data = segment.rows.read(first, first + count).view(-1).view(torch.uint8)
        return Piece(segment.peer, segment.layer, first, segment.rows.form, data)

    def _room(self, flow: _Flow) -> Piece:
        segment, rows = flow.segment, flow.segment.rows
        room = torch.empty(rows.num_rows * rows.row_bytes, dtype=torch.uint8, device=rows.device)
        return Piece(segment.peer, segment.layer, 0, rows.form, room)

    def _sent(self, flow: _Flow) -> None:
        layer = flow.segment.layer
        self._ledger.end_copy(flow.cells, writes=False)
        self._unsent[layer] -= 1
        if not self._unsent[layer]:
            self.plan.on_sent(layer)

    # In ---------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def receive(self, peer: int, parts: Sequence[Buffer | torch.Tensor]) -> None:
        """Takes a piece that another member sent over a `PeerChannel` or `BulkChannel`: its header, and its bytes.

        Raises:
            EngineError, ValueError: it is none of this transfer's.
        """
        head, data = parts
        assert not isinstance(head, torch.Tensor)
        what, header = self.plan.what, read_header(head)
        flow = self._incoming.get((peer, header.layer))
        stray = f"rank {peer} sent {what} of layer {header.layer} that does not belong here"
        if flow is None or self._is_over:
            raise EngineError(stray)
        rows, num_bytes = flow.segment.rows, data.numel() if isinstance(data, torch.Tensor) else memoryview(data).nbytes
        if header.form != rows.form:
            raise EngineError(f"rank {peer} packs {what} in another way: run one kind of CPU, one PyTorch")
        count, rest = divmod(num_bytes, rows.row_bytes)
        is_due = 0 <= header.first <= rows.num_rows - count and count <= flow.num_left
        if rest or not count or not is_due:
            raise EngineError(stray)
        if not isinstance(data, torch.Tensor):
            data = torch.frombuffer(data, dtype=torch.uint8)
        self._take(flow, header.first, data)
        self._finish()

    def _take(self, flow: _Flow, first: int, data: torch.Tensor) -> None:
        flow.num_moved += len(data) // flow.segment.rows.row_bytes
        if not self._write(flow, first, data):
            self._waiting.append((flow, first, data.cpu()))  # memory of the device is what it waits for

    @torch.inference_mode()
    def settle(self) -> None:
        """Writes what has come where there is memory for it now."""
        waiting, self._waiting = self._waiting, []
        self._waiting += [found for found in waiting if not self._write(*found)]
        self._finish()

    def _write(self, flow: _Flow, first: int, data: torch.Tensor) -> bool:
        """Whether there was memory for it."""
        rows, count = flow.segment.rows, len(data) // flow.segment.rows.row_bytes
        if not rows.is_ready(first, first + count):
            return False
        rows.write(first, data)
        flow.num_written += count
        if flow.num_written == rows.num_rows:
            self._written(flow)
        return True

    def _written(self, flow: _Flow) -> None:
        layer = flow.segment.layer
        self._ledger.end_copy(flow.cells, writes=True)
        del self._incoming[flow.segment.peer, layer]
        self._unwritten[layer] -= 1
        if not self._unwritten[layer]:
            self.plan.on_layer(layer)

    def awaits(self, layer: int) -> bool:
        """Whether something that comes for `layer` is not written yet."""
        return self._unwritten[layer] > 0

    def waiting_layers(self) -> list[int]:
        """Layers for which bytes have come that have no memory yet, in the order in which they came."""
        return list(dict.fromkeys(flow.segment.layer for flow, _, _ in self._waiting))

    # End --------------------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Cells that it reads or writes, each time counted."""
        return sum(flow.cells.num_cells for flow in (*self._outgoing, *self._incoming.values()))

    def cancel(self) -> None:
        """Ends it where it is. Nothing is in flight for it any more, and no callback comes. Idempotent."""
        if self._is_over:
            return
        for flow in self._outgoing:
            self._ledger.end_copy(flow.cells, writes=False)
        for flow in self._incoming.values():
            self._ledger.end_copy(flow.cells, writes=True)
        self._outgoing.clear()
        self._incoming.clear()
        self._unsent.clear()
        self._unwritten.clear()
        self._waiting.clear()
        self._is_over = True
        self._on_end(self)

    def _finish(self) -> None:
        if self._is_new or self._is_over or self._outgoing or self._incoming:
            return
        self._is_over = self.is_done = True
        self._on_end(self)
        self.plan.on_done()
