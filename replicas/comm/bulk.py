"""Much that goes from one member of a group to another beside its steps, over communicators of its own.

The group's communicator has an order that steps give it, and pieces of KV or weights have none that both ends know. So
each member is the only sender over one more communicator, and the others receive there in the order of its messages:

    sender     copies the piece, announces it in a peer message, begins to send
    receiver   a thread for each sender: the message comes, it receives into a room that has been there from the start

What a member sends never waits for the step thread of another: that one may wait until its device has done all that it
was given, which could be a piece of its own. So the receiving thread allocates nothing on the device, and it brings
pieces that the step thread has not taken yet to the host where their rooms are needed.
"""

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.comm.communicator import Move
from pengserve.replicas.comm.torch_group import TorchCommunicator

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20  # at most, and the size of a room
_ROOMS = 4  # that a member has for what the others send; each sender has one at least


def rooms_each(num_members: int) -> int:
    """Rooms that a member of such a pipeline has for what one other member sends."""
    return max(1, _ROOMS // max(1, num_members - 1))


OnLanded = Callable[["Landed"], object]
OnFailed = Callable[[EngineError], object]


class Landed:
    """A piece that has come, and lies in its room until it is taken or the room is needed."""

    def __init__(self, room: "_Room", data: torch.Tensor) -> None:
        self._room: _Room | None = room
        self._data: torch.Tensor | None = data
        self._moving = threading.Lock()

    @property
    def is_in_room(self) -> bool:
        """Whether it still keeps its room from others."""
        return self._room is not None

    def take(self) -> torch.Tensor:
        """Its bytes: a copy on the device, or on the host where they had to go there. Once, in the step thread."""
        with self._moving:
            data, self._data = self._data, None
            assert data is not None, "it was taken"
            if self._room is not None:
                data = data.clone()
                self._leave(self._room)
            return data

    def spill(self) -> None:
        """Brings it to the host if it is in its room."""
        with self._moving:
            if self._room is not None and self._data is not None:
                self._data = self._data.to("cpu", copy=True)
                self._leave(self._room)

    def _leave(self, room: "_Room") -> None:
        room.note_read()
        self._room = None


class _Room:
    """Memory for one piece."""

    def __init__(self, device: torch.device) -> None:
        self.data = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
        self._read: Any = None  # on CUDA, the event after which it may be overwritten
        self.is_free = True

    def note_read(self) -> None:
        """What this thread's stream has been given reads it, and nothing after that."""
        if self.data.is_cuda:
            self._read = torch.cuda.current_stream(self.data.device).record_event()
        self.is_free = True

    def claim(self) -> torch.Tensor:
        """Its memory, which this thread's stream may overwrite."""
        if self._read is not None:
            torch.cuda.current_stream(self.data.device).wait_event(self._read)
        self.is_free = False
        return self.data


class _Landing:
    """Receives what one other member sends."""

    def __init__(self, communicator: TorchCommunicator, src: int, device: torch.device, num_rooms: int) -> None:
        self._communicator, self._src, self._device = communicator, src, device
        self._rooms = [_Room(device) for _ in range(num_rooms)]
        self._landed: deque[Landed] = deque()  # what is in a room, the oldest first, and some that are not any more
        self._announced: queue.SimpleQueue[tuple[int, OnLanded, OnFailed] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"bulk-{src}", daemon=True)
        self._starting = threading.Lock()
        self._is_started = False

    def expect(self, num_bytes: int, on_landed: OnLanded, on_failed: OnFailed) -> None:
        self._announced.put((num_bytes, on_landed, on_failed))
        with self._starting:
            if not self._is_started:
                self._is_started = True
                self._thread.start()

    def end(self) -> None:
        self._announced.put(None)

    def _run(self) -> None:
        with _stream_of_its_own(self._device), torch.inference_mode():
            while (announced := self._announced.get()) is not None:
                num_bytes, on_landed, on_failed = announced
                try:
                    landed = self._land(num_bytes)
                except (EngineError, RuntimeError) as error:
                    on_failed(error if isinstance(error, EngineError) else EngineError(str(error)))
                    return
                on_landed(landed)

    def _land(self, num_bytes: int) -> Landed:
        room = self._free_room()
        data = room.claim()[:num_bytes]
        communicator = self._communicator
        communicator.finish(communicator.begin([Move(self._src, communicator.rank, data)]))
        landed = Landed(room, data)
        while self._landed and not self._landed[0].is_in_room:
            self._landed.popleft()
        self._landed.append(landed)
        return landed

    def _free_room(self) -> _Room:
        while True:
            if (room := next((room for room in self._rooms if room.is_free), None)) is not None:
                return room
            self._landed.popleft().spill()


class BulkWays:
    """One member's ends. `send` belongs to the step thread; any thread may call the others."""

    def __init__(self, communicators: Sequence[TorchCommunicator], device: torch.device) -> None:
        """`communicators`: by the rank that sends over them. One piece is under way from each member at a time."""
        own = communicators[0]
        self.members: tuple[InstanceKey, ...] = own.members
        self.rank, self._device = own.rank, device
        self._communicators = communicators
        num_rooms = rooms_each(len(communicators))
        self._landings: Mapping[int, _Landing] = {
            src: _Landing(communicator, src, device, num_rooms)
            for src, communicator in enumerate(communicators)
            if src != self.rank
        }
        self._under_way: Any = None

    def send(self, dst: int, data: torch.Tensor, announce: Callable[[], None]) -> None:
        """Begins to send bytes to a rank, when the piece before has come. `data` may be overwritten afterwards.

        Args:
            data: uint8, one-dimensional, at most `PIECE_BYTES`; on any device.
            announce: tells that rank of it, in the order of these calls.

        Raises:
            EngineError: a member is gone.
        """
        own, copy = self._communicators[self.rank], data.to(self._device, copy=True)
        if self._under_way is not None:
            own.finish(self._under_way)
        announce()  # first: what connects two members at their first call waits for both
        self._under_way = own.begin([Move(self.rank, dst, copy)])

    def receive(self, src: int, num_bytes: int, on_landed: OnLanded, on_failed: OnFailed) -> None:
        """To be called for each piece that `src` announces, in that order; returns at once.

        One of the two is called by another thread, `on_failed` where a member is gone.

        Raises:
            EngineError: there is no such piece.
        """
        landing = self._landings.get(src)
        if landing is None or not 0 < num_bytes <= PIECE_BYTES:
            raise EngineError(f"rank {src} announced {num_bytes} bytes; a piece has at most {PIECE_BYTES}")
        landing.expect(num_bytes, on_landed, on_failed)

    def abort(self) -> None:
        """Ends all of it; a thread that waits in `send` raises. Idempotent, never raises."""
        for communicator in self._communicators:
            communicator.abort()
        for landing in self._landings.values():
            landing.end()


def connect_ways(communicator: TorchCommunicator, src: int, device: torch.device) -> None:
    """Sends a byte from `src` to each other member, because two members connect at their first call.

    Raises:
        EngineError: they do not.
    """
    byte = torch.ones(1, dtype=torch.uint8, device=device)
    for dst in range(communicator.size):
        if dst != src and communicator.rank in (src, dst):
            communicator.finish(communicator.begin([Move(src, dst, byte)]))


def _stream_of_its_own(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """So that what is received waits for no step."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    torch.cuda.set_device(device)  # of this thread
    return torch.cuda.stream(torch.cuda.Stream(device))
