"""What a stage of a pipeline has on its host: rows with KV of requests, and on the leader the requests themselves.

KV comes back beside the steps. The leader waits until it is there on all members before it steps a request again, so it
has to know: each stage says with the hidden states that it hands on how many swap-ins have come on it and on all stages
before it. The leader has the last stage, so it hears of all.
"""

import struct
from collections.abc import Iterable, Sequence

from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.scheduling.block_groups import blocks_of
from pengserve.replicas.engine.tiers.swapping import SwappedRequests
from pengserve.replicas.engine.vllm_seam import Request, SchedulerOutput
from pengserve.replicas.kv.stage_rows import StageRows, Swap
from pengserve.replicas.kv.table import CellTable

_COME = struct.Struct(">I")


class StageHost:
    """Belongs to the step thread. Without a host tier there are no rows, and nothing is ever away."""

    rows: StageRows | None = None
    requests: SwappedRequests | None = None  # leader

    def __init__(self, table: CellTable) -> None:
        """`table`: this member's, of the lane's blocks."""
        self._table = table
        self._num_settled = 0  # leader: stage rows of all members, once KV has been exchanged
        self._num_heard: int | None = None  # swap-ins that have come on all stages before; None: none is before

    def open(self, rows: StageRows, requests: SwappedRequests | None) -> None:
        """There is a host tier."""
        self.rows, self.requests = rows, requests

    def enter(self, *, is_first: bool) -> None:
        """A pipeline begins; whether this member has its first stage."""
        self._num_heard = None if is_first else 0

    # Room -------------------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Stage rows that this member's host has room for; 0: it has no host tier."""
        return self.rows.num_rows if self.rows is not None else 0

    @property
    def num_own_rows(self) -> int:
        """Those in which `dp` has nothing."""
        return self.rows.num_own if self.rows is not None else 0

    def num_rows_beside(self, num_blocks: int) -> int:
        """Those that are left where `dp` keeps so many blocks on the host."""
        return self.rows.num_beside(num_blocks) if self.rows is not None else 0

    @property
    def num_host_rows(self) -> int:
        """Rows of the host that are this stage's, or free."""
        return self.rows.num_own_host_rows if self.rows is not None else 0

    def num_host_rows_of(self, rows: Iterable[int]) -> int:
        """Rows of the host behind these stage rows."""
        return self.rows.num_host_rows_of(rows) if self.rows is not None else 0

    def keep_only(self, rows: Iterable[int]) -> None:
        """All other stage rows hold nothing any more."""
        if self.rows is not None:
            self.rows.keep_only(rows)

    def may_swap(self, num_now: int, num_settled: int) -> None:
        """Leader: every member has room for so many stage rows, and for so many once KV has been exchanged."""
        if self.requests is not None:
            self.requests.limit(num_now)
        self._num_settled = num_settled

    def may_swap_all(self) -> None:
        """Leader: KV has been exchanged, or there was none to exchange."""
        self.may_swap(self._num_settled, self._num_settled)

    def give_up(self) -> None:
        """What the rows hold is of no use any more."""
        if self.rows is not None:
            self.rows.give_all()

    # Requests ---------------------------------------------------------------------------------------------------------

    def rows_of(self, request: Request) -> list[int]:
        """Leader: stage rows that have the KV of a request which has no blocks; empty where it has."""
        return self.requests.rows_of(request) if self.requests is not None else []

    def is_here(self, request: Request) -> bool:
        """Leader: whether all of a request's KV is on the devices."""
        return self.requests is None or not (self.requests.rows_of(request) or self.requests.is_coming(request))

    # Copies -----------------------------------------------------------------------------------------------------------

    def run(self, swaps: Sequence[Swap], output: SchedulerOutput) -> None:
        """What is to be copied before a microbatch, whose blocks are this member's; it may run when this returns.

        KV that the microbatch neither reads nor writes may still be on its way, to either side.
        """
        if self.rows is None:
            return
        for swap in swaps:
            self.rows.swap(swap._replace(blocks=self._table.physical(swap.blocks)))
        if len(self.rows.copies):
            self.rows.wait_for(_begun(output))

    def settled(self, blocks: Sequence[int]) -> list[int]:
        """This member's blocks behind those of the lane. No copy has them any more."""
        physical = self._table.physical(blocks)
        if self.rows is not None:
            self.rows.wait_for(physical)
        return physical

    def settle(self) -> None:
        """No copy is under way when this returns: memory is about to move."""
        if self.rows is not None:
            self.rows.copies.wait_all()

    def check(self) -> Sequence[str]:
        """Laws that are broken, in sentences: those of parked requests and of copies under way."""
        wrong = self.requests.check() if self.requests is not None else ()
        return (*wrong, *(self.rows.copies.check() if self.rows is not None else ()))

    def tell(self) -> Buffer:
        """What the next stage hears: the first part of what is handed on."""
        return _COME.pack(self._num_come())

    def hear(self, part: Buffer) -> None:
        """What the stage before has told."""
        self._num_heard = _COME.unpack(part)[0]

    def note_come(self) -> None:
        """Leader: its requests go on whose KV has come on all members."""
        if self.requests is not None:
            self.requests.queue.num_come = self._num_come()

    def _num_come(self) -> int:
        own = self.rows.copies.num_come if self.rows is not None else 0
        return own if self._num_heard is None else min(own, self._num_heard)


def _begun(output: SchedulerOutput) -> Iterable[int]:
    """Blocks that requests of a microbatch did not have before it."""
    for new in output.scheduled_new_reqs:
        yield from blocks_of(new.block_ids)
    for groups in output.scheduled_cached_reqs.new_block_ids:
        if groups is not None:
            yield from blocks_of(groups)
