"""How many tokens of each paced stream of this instance its client has not been sent yet.

The ingress releases them one in each interval, by `planners/deposit.py`. The instance makes the tokens, so it computes
the same from its own steps: no message says how deep a deposit is. A stream that comes from another instance begins
with none, so that what is told is never too much.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pengserve.planners.deposit import Deposit
from pengserve.planners.types.contract import Contract, Pacing

if TYPE_CHECKING:
    from pengserve.replicas.engine.vllm_seam import EngineCoreOutput

FEW = 64  # deposits, up to which none is looked for that has gone


class Deposits:
    """Belongs to the step thread. Times are of one monotonic clock."""

    def __init__(self, contract_of: Callable[[str], Contract]) -> None:
        self._contract_of = contract_of
        self._deposits: dict[str, Deposit] = {}
        self._prune_above = FEW

    def note(self, outputs: Iterable["EngineCoreOutput"], now_s: float) -> None:
        """A step made these. Call it while a request here has an SLO for its tokens."""
        for output in outputs:
            if output.finish_reason is not None:
                self._deposits.pop(output.request_id, None)
                continue
            deposit = self._deposits.get(output.request_id)
            if deposit is None:
                slo = self._contract_of(output.request_id).slo
                if slo is None or slo.pacing is not Pacing.STEADY or slo.tbt_s is None:
                    continue
                deposit = self._deposits[output.request_id] = Deposit(slo.tbt_s)
            for _ in deposit.add(len(output.new_token_ids), now_s):
                pass
        if len(self._deposits) > self._prune_above:
            self._prune()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests are here no more."""
        for request_id in request_ids:
            self._deposits.pop(request_id, None)

    def num_tokens(self, request_id: str, now_s: float) -> int:
        """Tokens in the deposit of a request; 0 where it has none."""
        deposit = self._deposits.get(request_id)
        return deposit.depth(now_s) if deposit is not None else 0

    def _prune(self) -> None:
        """Forgets requests that have moved to other instances."""
        self.forget([request_id for request_id in self._deposits if self._contract_of(request_id).slo is None])
        self._prune_above = max(FEW, 2 * len(self._deposits))

    def __len__(self) -> int:
        return len(self._deposits)
