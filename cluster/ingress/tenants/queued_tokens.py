"""Prompt tokens that wait on instances, by tenant: what a request of one of them has before it, without a look at all.

The table is made anew once in so many questions that each question pays for `VISITS` requests at most, and at least
once in `PERIOD_S`. So of n requests in flight the answer leaves out the newest n / `VISITS` at most.
"""

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable

from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.replicas.engine.link import InstanceLink

VISITS = 64
PERIOD_S = 0.25


class _Queue:
    """Of one instance."""

    def __init__(self, by_tenant: Counter[str]) -> None:
        self.by_tenant = by_tenant
        self._sizes = sorted(by_tenant.values())
        self._sums = [0, *itertools.accumulate(self._sizes)]

    def sum_up_to(self, most: int) -> int:
        """Tokens of all tenants, of each `most` at most."""
        index = bisect.bisect_right(self._sizes, most)
        return self._sums[index] + most * (len(self._sizes) - index)


_EMPTY = _Queue(Counter())


class QueuedTokens:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._queues: dict[InstanceLink, _Queue] = {}
        self._counted: set[str] = set()  # ids of the requests in it
        self._num_asked, self._made_s = 0, 0.0
        self.num_visits = 0  # of requests, ever

    def before(
        self,
        link: InstanceLink,
        record: RequestRecord,
        in_flight: Iterable[RequestRecord],
        num_in_flight: int,
        now_s: float,
    ) -> int:
        """Tokens on an instance that begin before those of a request: all of its own tenant's, and as many of each
        other tenant's, which take their turns with it.

        Args:
            in_flight: requests, which are looked at only where the table is made anew.
            num_in_flight: of them.
        """
        self._num_asked += 1
        if self._num_asked > num_in_flight // VISITS or not 0 <= now_s - self._made_s < PERIOD_S:
            self._make(in_flight, now_s)
        queue, tenant = self._queues.get(link, _EMPTY), record.options.contract.tenant
        listed = own = queue.by_tenant[tenant]
        if record.request.request_id in self._counted and record.link is link:
            own -= record.num_prompt_tokens
        most = own + record.num_prompt_tokens
        return own + queue.sum_up_to(most) - min(listed, most)

    def _make(self, in_flight: Iterable[RequestRecord], now_s: float) -> None:
        found: dict[InstanceLink, Counter[str]] = {}
        self._counted.clear()
        for record in in_flight:
            self.num_visits += 1
            if record.link is not None and record.first_token_s is None:
                queued = found.setdefault(record.link, Counter())
                queued[record.options.contract.tenant] += record.num_prompt_tokens
                self._counted.add(record.request.request_id)
        self._queues = {link: _Queue(queued) for link, queued in found.items()}
        self._num_asked, self._made_s = 0, now_s
