"""`pengserve.replicas.host`: a request's KV goes to the host when it gives way, and comes back when it goes on, and the
step waits for both: vLLM 0.x, FastSwitch's baseline.
"""

import sys
from collections.abc import Sequence

from pengserve.replicas import host
from pengserve.replicas.engine.tiers.lane_tiers import LaneTiers

_write, _bring = LaneTiers.write_behind, LaneTiers.bring


def write_and_wait(self: LaneTiers, blocks: Sequence[int]) -> None:
    """Copies blocks to the host."""
    _write(self, blocks)
    _wait(self)


def bring_and_wait(self: LaneTiers, blocks: Sequence[int], keep: Sequence[int]) -> bool:
    """Copies blocks to the device; they are there."""
    _bring(self, blocks, keep)
    _wait(self)
    return False


def _wait(lane: LaneTiers) -> None:
    traffic = lane.tiers.traffic
    traffic.wait(traffic.copies())


if __name__ == "__main__":
    LaneTiers.write_behind, LaneTiers.bring = write_and_wait, bring_and_wait  # type: ignore[method-assign]
    sys.exit(host.main())
