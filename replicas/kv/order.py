"""Order between copies and what a device computes.

A CPU has done its work when a call returns. On CUDA a call only gives the device work: copies have a stream of their
own, and wait there for marks in the stream that computes.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Order(Protocol):
    """What the copy engine asks of its device."""

    def mark(self) -> object:
        """All work that the calling thread has given the device so far."""

    def copying(self, after: object) -> AbstractContextManager[None]:
        """Around copies, which begin once the work of that mark is done, and have ended afterwards. None: no mark."""


class HostOrder:
    """Calls have ended when they return."""

    def mark(self) -> object:
        return None

    @contextmanager
    def copying(self, after: object) -> Iterator[None]:
        yield


class StreamOrder:
    """A stream of copies beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def copying(self, after: object) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            if after is not None:
                assert isinstance(after, torch.cuda.Event)
                self._stream.wait_event(after)
            yield
        self._stream.synchronize()


def order_of(device: torch.device) -> Order:
    """The order that a device needs."""
    return StreamOrder(device) if device.type == "cuda" else HostOrder()
