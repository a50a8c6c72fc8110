"""The one mover of bytes: KV and weights between members and within one, beside steps or in one go.

    plan       segments that leave and segments that come, made by those who know why (`replicas/engine`)
    submit     their cells are in flight from here on
    advance    pieces of the next segments leave, for about a step's time; `run`: all of them, in one go
    receive    a piece has come; it is written, or waits here until there is memory for it
    done       all that leaves has left, and all that comes is written

A transfer that is cancelled leaves nothing behind but undefined bytes in the cells that it wrote.
"""

import time

from pengserve.replicas.kv.channel import Channel
from pengserve.replicas.kv.ledger import CellLedger, Cells
from pengserve.replicas.kv.pacing import Pace
from pengserve.replicas.kv.transfer import Transfer, TransferPlan

FULL = 0.5  # the share of its time after which `advance` begins no other piece


class Transfers:
    """All transfers of one instance. Belongs to the step thread."""

    def __init__(self, ledger: CellLedger) -> None:
        self.is_busy = False  # whether `advance` has anything to do
        self._ledger = ledger
        self._under_way: list[Transfer] = []

    def submit(self, plan: TransferPlan, channel: Channel, pace: Pace | None = None) -> Transfer:
        """Begins a transfer that `advance` goes on with, at the pace of those before it where they share one.

        Raises ValueError, and changes nothing, where another copy is in the way: ask `conflicts` first.
        """
        transfer = Transfer(plan, channel, self._ledger, self._under_way.remove, pace)
        transfer.begin()
        self._under_way.append(transfer)
        self.is_busy = True
        return transfer

    def run(self, transfer: Transfer) -> None:
        """Makes all moves of a transfer now, together with the other members. What has come may still wait for memory.

        Raises:
            EngineError: a member is gone; the transfer is cancelled.
        """
        try:
            transfer.run()
        except BaseException:
            transfer.cancel()
            raise
        finally:
            self._look()

    def advance(self, budget_s: float) -> None:
        """Sends pieces for about `budget_s` seconds, of the transfers that were submitted first and are not sent.

        That is one piece of a large transfer, or all of several small ones.

        Raises what the channel raised, once that transfer is cancelled, unless its plan has an `on_failed`.
        """
        stop_s = time.perf_counter() + budget_s * FULL
        try:
            while (transfer := next((other for other in self._under_way if other.is_sending), None)) is not None:
                self._advance(transfer, budget_s)
                if time.perf_counter() >= stop_s:
                    break
        finally:
            self._look()

    @staticmethod
    def _advance(transfer: Transfer, budget_s: float) -> None:
        try:
            transfer.advance(budget_s)
        except Exception as error:
            transfer.cancel()
            if transfer.plan.on_failed is None:
                raise
            transfer.plan.on_failed(error)

    def wait_layer(self, layer: int) -> bool:
        """Makes all copies within this member that bring KV of `layer` now.

        False where other members still send some, or it has no memory yet: no request may read the layer's cells then.
        """
        for transfer in self._under_way.copy():
            transfer.hurry(layer)
        self._look()
        return not any(transfer.awaits(layer) for transfer in self._under_way)

    def conflicts(self, cells: Cells) -> list[int]:
        """Blocks of `cells` that a copy reads or writes: they cannot be freed, leased anew or written now."""
        return self._ledger.conflicts(cells)

    def cancel(self, transfer: Transfer) -> None:
        """Ends a transfer where it is. Nothing is in flight for it any more, and no callback comes. Idempotent."""
        transfer.cancel()
        self._look()

    def cancel_of(self, lane: str) -> None:
        """Ends the transfers of one lane, as `cancel` does."""
        for transfer in [other for other in self._under_way if other.plan.lane == lane]:
            self.cancel(transfer)

    def check(self) -> tuple[str, ...]:
        """Laws that are broken, as sentences: what is in flight is what transfers under way read and write."""
        expected = sum(transfer.num_in_flight for transfer in self._under_way)
        found = self._ledger.num_in_flight
        return () if expected == found else (f"transfers have {expected} cells in flight, the ledger says {found}",)

    def _look(self) -> None:
        self.is_busy = any(transfer.is_sending for transfer in self._under_way)
