"""`pengserve up` as two processes: one that serves, in a session of its own, and one that takes signals and clears up.

A signal to the whole process group, as systemd and `timeout` send it, would otherwise reach Ray's processes and HAProxy
before the application is drained, and kill them in any order. Here it reaches the supervisor alone, which passes it on.
The supervisor imports neither Ray nor vLLM. However the serving process ends, the supervisor ends what is left of it.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from pengserve.cluster.cli.scratch import MARK, Scratch
from pengserve.planners.types.errors import EngineError
from pengserve.replicas.parent_death import signal_when_parent_ends
from pengserve.replicas.signal_flag import SignalFlag

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ASK, INSIST = signal.SIGINT, signal.SIGUSR1  # to the serving process; Ray takes SIGTERM for itself while it starts
REPEAT_S = 0.5  # `timeout` sends to the process and to its group: the same signal so soon is the same request
PATIENCE_S = 5.0  # for processes that end by themselves when the serving process has
INSIST_PATIENCE_S = 20.0  # for the serving process, after it was told to stop at once
KILLED_EXIT_CODE = 130  # as Ctrl-C has it


class StopRequest:
    """SIGINT, SIGTERM and SIGHUP: the first asks to stop, the second insists (KeyboardInterrupt), further ones wait."""

    def __init__(self) -> None:
        self._asked = SignalFlag()
        self._has_insisted = False
        self._repeat = Repeats()

    @property
    def is_asked(self) -> bool:
        """Whether the first signal came."""
        return self._asked.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the first signal; whether it came."""
        return self._asked.wait(timeout_s)

    def listen(self) -> None:
        """Take over the signals; main thread only."""
        for number in caught_signals():
            signal.signal(number, self._on_signal)
        signal.signal(INSIST, self._on_insist)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take over the signals inside the block."""
        with kept_handlers():
            self.listen()
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._repeat.is_one(number):
            return
        if self._asked.is_set():
            self._on_insist(number, frame)
        self._asked.set()

    def _on_insist(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()
        if not self._has_insisted:
            self._has_insisted = True
            raise KeyboardInterrupt


class Repeats:
    """Tells a signal that is the one before once more."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last_s: dict[int, float] = {}

    def is_one(self, number: int) -> bool:
        """Whether the same signal came a moment ago. Notes this one."""
        now_s = self._now()
        last_s = self._last_s.get(number)
        self._last_s[number] = now_s
        return last_s is not None and now_s - last_s < REPEAT_S


def caught_signals() -> list[signal.Signals]:
    """The signals to take over. `nohup` has SIGHUP ignored, and that is kept."""
    return [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


@contextlib.contextmanager
def kept_handlers() -> Iterator[None]:
    """Puts the handlers of the signals back after the block."""
    kept = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, INSIST)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def supervise(serve: Callable[[Scratch, StopRequest], int]) -> int:
    """Run `serve` in a child process, with signals passed on; its exit code, when nothing of it is left.

    Returns twice, as `fork` does: in the child with the code of `serve`, which the child must then exit with. What
    `serve` raises is raised in the child.

    Raises:
        EngineError: the child was killed.
    """
    scratch = Scratch.create()
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # none may come between the fork and the handlers
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        return _serve(serve, scratch, supervisor, mask)
    forwarder = _Forwarder(child)
    with kept_handlers():
        forwarder.listen()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = forwarder.wait()
        scratch.end_processes(0.0 if forwarder.has_insisted else PATIENCE_S)
        scratch.remove()
    if code < 0 and not forwarder.has_insisted:
        raise EngineError(f"the serving process was killed by {signal.Signals(-code).name}")
    return code if code >= 0 else KILLED_EXIT_CODE


def _serve(
    serve: Callable[[Scratch, StopRequest], int], scratch: Scratch, supervisor: int, mask: set[int | signal.Signals]
) -> int:
    os.setsid()
    # A supervisor that is killed asks to stop by it.
    if not signal_when_parent_ends(ASK, supervisor):
        os._exit(1)
    os.environ[MARK] = scratch.mark
    stop = StopRequest()
    try:
        with stop.listening():
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return serve(scratch, stop)
    finally:
        if os.getppid() != supervisor:
            scratch.end_processes(PATIENCE_S)
            scratch.remove()


class _Forwarder:
    """Passes signals on to the serving process: one to ask, one to insist. In the end it is killed."""

    def __init__(self, child: int) -> None:
        self._child = child
        self._repeats = Repeats()
        self._num_signals = 0
        self._killer = threading.Timer(INSIST_PATIENCE_S, self._send, [signal.SIGKILL])
        self._killer.daemon = True

    @property
    def has_insisted(self) -> bool:
        """Whether the serving process was told to stop at once."""
        return self._num_signals > 1

    def listen(self) -> None:
        """Take over the signals; main thread only."""
        for number in caught_signals():
            signal.signal(number, self._on_signal)

    def wait(self) -> int:
        """Wait until the serving process has ended; its exit code, negative where a signal killed it."""
        while True:  # reaps others too: this may be a container's init
            pid, status = os.wait()
            if pid == self._child:
                self._killer.cancel()
                return os.waitstatus_to_exitcode(status)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._repeats.is_one(number):
            return
        self._num_signals += 1
        if self._num_signals == 1:
            self._send(ASK)
        elif self._num_signals == 2:
            self._send(INSIST)
            self._killer.start()

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, number)
