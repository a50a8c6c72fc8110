"""What switching takes of the steps' time: counted in the instance (`call_times.py`), read while it serves."""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

PATH = "PENGSERVE_BENCH_TIMES"  # variable of the environment: the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Totals since the instance began, or of a part of its time."""

    steps_s: float = 0.0  # all steps, with what vLLM computes in them
    manager_s: float = 0.0  # ... calls that decide who gives way and say where KV is: FastSwitch's call overhead
    waits_s: float = 0.0  # ... in which a step waited for a copy
    copies: float = 0.0  # calls that moved KV between device and host

    def since(self, before: "Times") -> "Times":
        """What has come since."""
        return Times(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)})


def make(path: Path) -> None:
    """Makes the file that an instance counts in."""
    np.zeros(len(fields(Times))).tofile(path)


def read(path: Path) -> Times:
    """What an instance has counted so far."""
    return Times(**dict(zip((f.name for f in fields(Times)), np.fromfile(path).tolist(), strict=True)))
