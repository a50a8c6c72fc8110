"""What an arena needs of a device."""

from collections.abc import Sequence
from typing import Protocol

import torch


class Backend(Protocol):
    """Physical chunks of one device, by number, and addresses at which they can be seen.

    It keeps no books: the arena never maps what is mapped, nor unmaps what is not. `map` and `unmap` either happen
    whole or change nothing, and return the number of calls to the system that they took.
    """

    granularity: int
    """Bytes; chunks are multiples of it."""

    def create(self, num_chunks: int, chunk_bytes: int) -> None:
        """Takes physical memory for so many chunks more, which are numbered on from those that are there.

        Raises:
            ConfigError: the device does not have it; what was held before is held still.
        """

    def reserve(self, num_bytes: int) -> int:
        """The address of a new range with nothing behind it.

        Raises:
            StepError: the system refused.
        """

    def map(self, address: int, chunks: Sequence[int]) -> int:
        """Puts `chunks`, in order, behind the addresses from `address` on. They keep their bytes.

        Raises:
            StepError: the system refused; nothing changed.
            EngineError: the system refused, and then refused to put back what was before.
        """

    def wait(self) -> None:
        """Returns when no work that the device has been given can touch its memory any more.

        Raises:
            StepError: that work has failed.
        """

    def unmap(self, address: int, num_chunks: int) -> int:
        """Takes away what is behind the range. The range stays reserved. To be called after `wait`.

        Raises:
            StepError: the system refused; nothing changed.
        """

    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        """The range as bytes, `[num_bytes]`, without touching them. Keeps `owner` alive."""

    def release(self) -> None:
        """Gives the physical memory back. Idempotent; nothing is mapped any more."""

    def free(self, address: int, num_bytes: int) -> None:
        """Gives an address range of `reserve` back; nothing is mapped in it."""
