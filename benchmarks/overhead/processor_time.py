"""Processor time of one system's own processes, whichever other work the machine does."""

import psutil

TAG = "BENCH_SYSTEM"  # an environment variable; a process inherits it from the one that starts it


def processor_time_s(system: str) -> float:
    """User and system time of all live processes that were started with `TAG` set to `system`, in seconds.

    Time of children that have ended counts with their parent.
    """
    total_s = 0.0
    for process in psutil.process_iter():
        try:
            if process.environ().get(TAG) == system:
                total_s += sum(process.cpu_times()[:4])
        except psutil.Error:
            continue  # it has ended, or it is another user's
    return total_s
