"""A flag that signal handlers set, at any moment of the thread that waits for it."""

import subprocess
import sys
import threading
import time

from pengserve.replicas.signal_flag import SignalFlag

# A signal each 0.1 ms meets thousands of waits, each of 0.01 ms. A lock that a handler must wait for is soon met.
MEETINGS = """
import signal
from pengserve.replicas.signal_flag import SignalFlag

flag = SignalFlag()
signal.signal(signal.SIGALRM, lambda *_: flag.set())
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
for _ in range(5_000):
    flag = SignalFlag()
    while not flag.wait(1e-5):
        assert not flag.is_set() or flag.wait(0.0)
signal.setitimer(signal.ITIMER_REAL, 0.0)
print("met")
"""


def test_a_handler_may_interrupt_a_wait_at_any_moment():
    told = subprocess.run([sys.executable, "-c", MEETINGS], capture_output=True, text=True, timeout=120)
    assert told.stdout == "met\n", told.stderr


def test_a_wait_ends_at_its_time_out():
    began_s = time.monotonic()
    assert not SignalFlag().wait(0.05)
    assert time.monotonic() - began_s >= 0.05


def test_all_that_wait_are_woken():
    flag, woken = SignalFlag(), []
    threads = [threading.Thread(target=lambda: woken.append(flag.wait(60)), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    flag.set()
    for thread in threads:
        thread.join(60)
    assert woken == [True] * 3 and flag.is_set() and flag.wait()
