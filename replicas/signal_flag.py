"""A flag that a signal handler can set. Standard library only: the supervisor of `pengserve up` imports this."""

import queue


class SignalFlag:
    """What `threading.Event` is between threads, for signal handlers too.

    A handler interrupts the main thread anywhere. While that thread waits for an `Event` it holds the
    event's lock for a moment; a handler that sets the event in this moment waits for that lock for ever.
    `queue.SimpleQueue.put` may interrupt a `get` of the same thread.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Set the flag and wake all that wait for it."""
        self._is_set = True
        self._wakes.put(None)

    def is_set(self) -> bool:
        """Whether the flag was set."""
        return self._is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the flag is set; whether it is.

        Args:
            timeout_s: seconds to wait at most; None waits without an end.
        """
        if not self._is_set:
            try:
                self._wakes.get(timeout=timeout_s)
            except queue.Empty:
                return self._is_set
            self._wakes.put(None)  # for the next thread that waits
        return True
