"""Processes that end with the one that started them. Standard library only: Ray's and HAProxy's starts import this."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def signal_when_parent_ends(number: signal.Signals, parent: int) -> bool:
    """Have the kernel send this process `number` when the thread that started it ends, however that ends.

    Args:
        parent: process id of the parent, as it was before this process could be left alone.

    Returns:
        False where the parent has ended already: the signal will not come, and the caller should end.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    return os.getppid() == parent
