"""`pengserve.replicas.host`: a request that gives way loses its KV and computes it again, as where vLLM preempts."""

import sys
from collections.abc import Sequence
from typing import Any

from pengserve.replicas import host
from pengserve.replicas.engine.tiers.lane_tiers import LaneTiers
from pengserve.replicas.engine.tiers.residency import ResidentRequests

_hold = ResidentRequests._hold


def give_up(self: ResidentRequests, request: Any) -> None:
    """In place of parking."""
    _hold(self, request)
    self._give_up(request)


def write_nothing(self: LaneTiers, blocks: Sequence[int]) -> None:
    """The host keeps nothing."""


if __name__ == "__main__":
    ResidentRequests._hold = give_up  # type: ignore[method-assign]
    LaneTiers.write_behind = write_nothing  # type: ignore[method-assign]
    sys.exit(host.main())
