"""Tells the controller what the requests of this ingress want, while there are any."""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic

from pengserve.cluster.ingress.in_flight.records import RequestBook
from pengserve.cluster.ingress.routing.routes import RoutingSource
from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.snapshot import Demand

logger = logging.getLogger(__name__)

PERIOD_S = 0.2  # between two reports of a demand that changes
REPEAT_S = 2.0  # ... and of one that stays
REPORT_TIMEOUT_S = 5.0
PAUSE_S = 1.0  # after a report that did not reach the controller

NOTHING = Demand()


class DemandReporter:
    """Reports the demand of a book. It sleeps while there are no requests."""

    def __init__(
        self, book: RequestBook, source: RoutingSource, client_id: str, clock: Callable[[], float] = monotonic
    ) -> None:
        self._clock = clock
        self._book, self._source, self._client_id = book, source, client_id
        self._sent, self._sent_s = NOTHING, 0.0

    async def run(self) -> None:
        """Runs until cancelled.

        Waits for: a request; then for a change of the demand.   Produces: reports, the last one that nothing is left.
        """
        while True:
            await self._book.used.wait()
            demand = self._book.demand()
            is_repeat = demand == self._sent
            if not is_repeat or (demand != NOTHING and self._clock() - self._sent_s >= REPEAT_S):
                await self._report(demand)
            elif demand == NOTHING:
                self._book.used.clear()
            await asyncio.sleep(PERIOD_S)

    async def _report(self, demand: Demand) -> None:
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                await self._source.report_demand(self._client_id, demand)
        except (EngineError, TimeoutError) as error:
            logger.debug("the demand could not be reported: %s", error or "no answer")
            await asyncio.sleep(PAUSE_S)
            return
        self._sent, self._sent_s = demand, self._clock()
