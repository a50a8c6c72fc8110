"""Collectives over one blocking TCP connection per pair of members, made by the calling thread itself.

gloo hands every call to worker threads, which costs more than the call when instances share cores
(docs/decisions/0006-communicators.md). Here a small all-reduce is one `sendmsg` and one `recvmsg_into` per peer:

    | u32 number of the transfer | u32 tag | u64 bytes | bytes ... |

The header is there to notice members that are out of step; it is checked before the data is used.
"""

import contextlib
import ctypes
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence

import torch

from pengserve.planners.types.errors import EngineError, LinkLostError
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.channel.tcp import set_receive_timeout
from pengserve.replicas.comm.communicator import Communicator, Move, copy_back, move_buffers

_HEADER = struct.Struct("<IIQ")
_MAX_VECTORS = 256  # buffers in one system call; the kernel takes 1024
_TAG_LIMIT = 1 << 16

# Tags of the collectives, above those of `send` and `recv`.
_REDUCE, _SCATTER, _GATHER, _BROADCAST, _BARRIER, _EXCHANGE = range(_TAG_LIMIT, _TAG_LIMIT + 6)

# How more than two members sum (figures: docs/decisions/0006-communicators.md). Below this size the first sums for all,
# with the fewest messages; from it on each sums a share, with the fewest bytes per member.
_SHARED_REDUCE_BYTES = 512 << 10

_LAST_WORDS_MS = 100  # what a member sent before another one ended the group may still be on its way


class _Flow:
    """Bytes on their way to or from one peer."""

    def __init__(self, peer: "_Peer", views: list[memoryview]) -> None:
        self.peer, self._views, self._next = peer, views, 0
        self.left_bytes = sum(map(len, views))

    def push(self) -> bool:
        """Sends what the kernel takes now; whether all is sent."""
        while self.left_bytes:
            try:
                count = self.peer.sock.sendmsg(self._batch(), (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            self._advance(count)
        return True

    def pull(self, flags: int) -> bool:
        """Receives once; whether all has come. Raises BlockingIOError where nothing came in time."""
        count = self.peer.sock.recvmsg_into(self._batch(), 0, flags)[0]
        if count == 0:
            raise LinkLostError(f"instance {self.peer.key} closed its connection")
        self._advance(count)
        return not self.left_bytes

    def _batch(self) -> list[memoryview]:
        return self._views[self._next : self._next + _MAX_VECTORS] if self._next else self._views[:_MAX_VECTORS]

    def _advance(self, count: int) -> None:
        self.left_bytes -= count
        if not self.left_bytes:
            return
        while count >= len(self._views[self._next]):
            count -= len(self._views[self._next])
            self._next += 1
        if count:
            self._views[self._next] = self._views[self._next][count:]


class _Peer:
    """One other member: its connection, the transfers so far, and room for what it sends."""

    def __init__(self, key: InstanceKey, rank: int, sock: socket.socket) -> None:
        self.key, self.rank, self.sock = key, rank, sock
        self.sent = self.received = 0  # transfers
        self._head = bytearray(_HEADER.size)
        self._head_view = memoryview(self._head)
        self._room = torch.empty(0, dtype=torch.uint8)

    def outgoing(self, tag: int, views: list[memoryview]) -> _Flow:
        head = _HEADER.pack(self.sent & 0xFFFFFFFF, tag, sum(map(len, views)))
        self.sent += 1
        return _Flow(self, [memoryview(head), *views])

    def incoming(self, views: list[memoryview]) -> _Flow:
        return _Flow(self, [self._head_view, *views])

    def check(self, tag: int, num_bytes: int) -> None:
        """Raises LinkLostError where the newest transfer is not the expected one."""
        got, want = _HEADER.unpack(self._head), (self.received & 0xFFFFFFFF, tag, num_bytes)
        self.received += 1
        if got != want:
            raise LinkLostError(f"instance {self.key} is out of step: it sent {got} for (transfer, tag, bytes) {want}")

    def room_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Scratch of the form of `tensor`, valid until the next call."""
        if self._room.numel() < tensor.nbytes:
            self._room = torch.empty(max(4096, tensor.nbytes), dtype=torch.uint8)
        return self._room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class DirectCommunicator(Communicator):
    """Tensors must be on the CPU. `sockets` holds a connection per other rank, which this object then owns."""

    def __init__(
        self,
        name: str,
        members: Sequence[InstanceKey],
        rank: int,
        timeout_s: float,
        sockets: Mapping[int, socket.socket],
    ) -> None:
        super().__init__(name, members, rank, timeout_s)
        if sorted([*sockets, rank]) != list(range(self.size)):
            raise ValueError(f"rank {rank} of {name} needs a connection to each other rank, got {sorted(sockets)}")
        for sock in sockets.values():
            set_receive_timeout(sock, timeout_s)
        self._peers = {peer: _Peer(self.members[peer], peer, sockets[peer]) for peer in sorted(sockets)}
        self._using = threading.Lock()  # held during a call, so that no other thread closes its sockets
        self._is_broken = False
        self._watches = {rank: self._watch(rank) for rank in self._peers} if self.size > 2 else {}

    @property
    def is_broken(self) -> bool:
        return self._is_broken

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        data = tensor.contiguous()
        if self.size == 2:
            other, room = self._rooms(data)[0]
            self._transfer(_REDUCE, {other: [_bytes_of(data)]}, {other: [_bytes_of(room)]})
            data.add_(room)  # a sum of two has the same bits in either order
        elif data.nbytes < _SHARED_REDUCE_BYTES:
            self._reduce_at_first(data)
        else:
            self._reduce_in_shares(data.view(-1))
        if data is not tensor:
            tensor.copy_(data)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        data = tensor.contiguous()
        parts = data.new_empty((self.size, *data.shape))
        parts[self.rank] = data
        mine = [_bytes_of(data)]
        self._transfer(
            _GATHER, dict.fromkeys(self._peers, mine), {rank: [_bytes_of(parts[rank])] for rank in self._peers}
        )
        return _joined(parts, dim)

    def gather(self, tensor: torch.Tensor, dst: int = 0, dim: int = 0) -> torch.Tensor | None:
        data = tensor.contiguous()
        if self.rank != dst:
            self._transfer(_GATHER, {dst: [_bytes_of(data)]}, {})
            return None
        parts = data.new_empty((self.size, *data.shape))
        parts[self.rank] = data
        self._transfer(_GATHER, {}, {rank: [_bytes_of(parts[rank])] for rank in self._peers})
        return _joined(parts, dim)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        data = tensor.contiguous()
        view = [_bytes_of(data)]
        if self.rank == src:
            self._transfer(_BROADCAST, dict.fromkeys(self._peers, view), {})
            return tensor
        self._transfer(_BROADCAST, {}, {src: view})
        return tensor if data is tensor else tensor.copy_(data)

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        data = tensor.contiguous()
        self._transfer(_checked(tag), {dst: [_bytes_of(data)]}, {})

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> torch.Tensor:
        data = tensor.contiguous()
        self._transfer(_checked(tag), {}, {src: [_bytes_of(data)]})
        return tensor if data is tensor else tensor.copy_(data)

    def barrier(self) -> None:
        self._transfer(_BARRIER, {rank: [] for rank in self._peers}, {rank: [] for rank in self._peers})

    def exchange(self, moves: Sequence[Move]) -> None:
        outgoing, incoming = move_buffers(moves, self.rank)
        out: dict[int, list[memoryview]] = {}
        into: dict[int, list[memoryview]] = {}
        for move in outgoing:
            out.setdefault(move.dst, []).append(_bytes_of(move.tensor))
        for move in incoming:
            into.setdefault(move.src, []).append(_bytes_of(move.tensor))
        self._transfer(_EXCHANGE, out, into)
        copy_back(moves, incoming, self.rank)

    def abort(self) -> None:
        self._is_broken = True
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)
        if self._using.acquire(blocking=False):
            self._close()
            self._using.release()

    def _close(self) -> None:
        for peer in self._peers.values():
            peer.sock.close()

    def _rooms(self, tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """(rank, scratch of the form of `tensor`) for each other member."""
        return [(rank, peer.room_like(tensor)) for rank, peer in self._peers.items()]

    def _reduce_at_first(self, data: torch.Tensor) -> None:
        """Rank 0 sums, and sends the sum to all."""
        view = [_bytes_of(data)]
        if self.rank == 0:
            rooms = self._rooms(data)
            self._transfer(_REDUCE, {}, {rank: [_bytes_of(room)] for rank, room in rooms})
            for _, room in rooms:
                data.add_(room)
            self._transfer(_BROADCAST, {rank: view for rank, _ in rooms}, {})
        else:
            self._transfer(_REDUCE, {0: view}, {})
            self._transfer(_BROADCAST, {}, {0: view})

    def _reduce_in_shares(self, flat: torch.Tensor) -> None:
        """Rank r sums the r-th share of all members, then all gather the shares."""
        shares = flat.tensor_split(self.size)
        mine = shares[self.rank]
        rooms = self._rooms(mine)
        self._transfer(
            _SCATTER,
            {rank: [_bytes_of(shares[rank])] for rank, _ in rooms},
            {rank: [_bytes_of(room)] for rank, room in rooms},
        )
        parts = [room for _, room in rooms]
        parts.insert(self.rank, mine.clone())
        torch.add(parts[0], parts[1], out=mine)
        for part in parts[2:]:
            mine.add_(part)
        view = [_bytes_of(mine)]
        self._transfer(
            _GATHER, {rank: view for rank, _ in rooms}, {rank: [_bytes_of(shares[rank])] for rank, _ in rooms}
        )

    def _transfer(
        self, tag: int, outgoing: Mapping[int, list[memoryview]], incoming: Mapping[int, list[memoryview]]
    ) -> None:
        """Sends and receives all of it. Raises EngineError, and breaks the group, where that fails."""
        if not self._using.acquire(blocking=False):
            raise EngineError(f"group {self.name} is in use by another thread; one thread at a time may call it")
        try:
            if self._is_broken:
                raise LinkLostError("it is broken")
            self._move_bytes(tag, outgoing, incoming)
        except BlockingIOError as error:
            self._break()
            raise self._broken(_name(tag), f"a member was silent for {self.timeout_s} s") from error
        except (OSError, LinkLostError) as error:
            reason = "it was aborted, or an earlier call failed" if self._is_broken else error
            self._break()
            raise self._broken(_name(tag), reason) from error
        finally:
            self._using.release()

    def _break(self) -> None:
        """Ends all connections, so that the other members need not wait for their time-outs."""
        self.abort()  # does not close: this thread is still in the call
        self._close()

    def _move_bytes(
        self, tag: int, outgoing: Mapping[int, list[memoryview]], incoming: Mapping[int, list[memoryview]]
    ) -> None:
        sends = [self._peers[rank].outgoing(tag, views) for rank, views in outgoing.items()]
        receives = [self._peers[rank].incoming(views) for rank, views in incoming.items()]
        sizes = [flow.left_bytes - _HEADER.size for flow in receives]
        waiting = [flow for flow in sends if not flow.push()]
        if waiting:
            self._pump(waiting, receives)
        for flow, num_bytes in zip(receives, sizes, strict=True):
            while flow.left_bytes:
                if self._watches:
                    self._await(flow.peer)
                    flow.pull(socket.MSG_DONTWAIT)
                else:
                    flow.pull(socket.MSG_WAITALL)
            flow.peer.check(tag, num_bytes)

    def _watch(self, wanted: int) -> select.poll:
        poller = select.poll()
        for rank, peer in self._peers.items():
            poller.register(peer.sock, select.POLLRDHUP | (select.POLLIN if rank == wanted else 0))
        return poller

    def _await(self, peer: _Peer) -> None:
        """Waits until `peer` has sent something, or any member has ended the group."""
        wanted = peer.sock.fileno()
        events = self._watches[peer.rank].poll(self.timeout_s * 1e3)
        if not events:
            raise BlockingIOError
        if any(fd == wanted for fd, _ in events):
            return
        alone = select.poll()
        alone.register(wanted, select.POLLIN)
        if not alone.poll(_LAST_WORDS_MS):
            gone = [str(other.key) for other in self._peers.values() if other.sock.fileno() in dict(events)]
            raise LinkLostError(f"instance {', '.join(gone)} closed its connection")

    def _pump(self, sends: list[_Flow], receives: list[_Flow]) -> None:
        """Reads while the kernel takes no more to send: the members may all be sending to each other."""
        poller = select.poll()
        by_fd: dict[int, list[_Flow | None]] = {}
        for slot, flows in enumerate((sends, receives)):
            for flow in flows:
                by_fd.setdefault(flow.peer.sock.fileno(), [None, None])[slot] = flow
        for fd, (out, into) in by_fd.items():
            poller.register(fd, (select.POLLOUT if out else 0) | (select.POLLIN if into else 0))
        num_sends = len(sends)
        deadline_s = time.monotonic() + self.timeout_s
        while num_sends:
            events = poller.poll(max(0.0, deadline_s - time.monotonic()) * 1e3)
            if not events:
                raise BlockingIOError
            deadline_s = time.monotonic() + self.timeout_s  # as long as bytes move, all is well
            for fd, _ in events:
                flows_of = by_fd[fd]
                out, into = flows_of
                if out is not None and out.push():
                    flows_of[0], num_sends = None, num_sends - 1
                if into is not None:
                    with contextlib.suppress(BlockingIOError):
                        if into.pull(socket.MSG_DONTWAIT):
                            flows_of[1] = None
                wanted = (select.POLLOUT if flows_of[0] else 0) | (select.POLLIN if flows_of[1] else 0)
                if wanted:
                    poller.modify(fd, wanted)
                else:
                    poller.unregister(fd)  # if that peer hangs up, each later poll would return at once


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype. Keep the tensor alive while this is in use."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"need a contiguous tensor on the CPU, got {tensor.shape} on {tensor.device}")
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """`[p, ...]` as one tensor whose `dim` is p times as long."""
    if parts.dim() == 1:
        return parts
    dim %= parts.dim() - 1
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)


def _checked(tag: int) -> int:
    if not 0 <= tag < _TAG_LIMIT:
        raise ValueError(f"a tag is in [0, {_TAG_LIMIT}), got {tag}")
    return tag


def _name(tag: int) -> str:
    names = {
        _REDUCE: "all_reduce",
        _SCATTER: "all_reduce",
        _GATHER: "gather",
        _BROADCAST: "broadcast",
        _BARRIER: "barrier",
        _EXCHANGE: "exchange",
    }
    return names.get(tag, "send or receive")
