"""What an instance knows of the requests that it serves: their contracts, and the depth of their deposits."""

import time
from collections.abc import Callable

from pengserve.planners.types.contract import Contract
from pengserve.replicas.deposits import Deposits
from pengserve.replicas.open_requests import OpenRequests


class KnownContracts:
    """For the planners of the step thread (`replicas/engine/placement/slo_gate.py`)."""

    def __init__(self, requests: OpenRequests, deposits: Deposits, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: the one that `deposits` goes by."""
        self._requests, self._deposits, self._clock = requests, deposits, clock

    def contract(self, request_id: str) -> Contract:
        """What holds for a request."""
        return self._requests.contract(request_id)

    @property
    def num_paced(self) -> int:
        """Requests here that have an SLO for the time between tokens."""
        return self._requests.num_paced

    def is_paced(self, request_id: str) -> bool:
        """Whether a request has an SLO for the time between its tokens."""
        return self._requests.is_paced(request_id)

    @property
    def num_hurried(self) -> int:
        """Requests here that have an SLO for their first token."""
        return self._requests.num_hurried

    def gone(self, request_id: str) -> float:
        """Share of the time to its first token that is gone; 0 where nothing was promised."""
        return self._requests.gone(request_id)

    def deposit_tokens(self, request_id: str) -> int:
        """Tokens of a request that its client has not been sent yet."""
        return self._deposits.num_tokens(request_id, self._clock())
