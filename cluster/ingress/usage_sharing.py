"""Shares tenants' counters with the other ingresses, through the controller, while requests are in flight."""

import asyncio
import logging

from pengserve.cluster.ingress.in_flight.records import RequestBook
from pengserve.cluster.ingress.routing.routes import RoutingSource
from pengserve.planners.fairness import FairShares
from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.tenants import UsageReport

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
CALL_TIMEOUT_S = 2.0


class UsageSharing:
    """What other ingresses have charged is known here within `PERIOD_S` of each side and `CALL_TIMEOUT_S`.

    While the controller is away an ingress goes by its own counters and the last that it heard of.
    """

    def __init__(self, shares: FairShares, book: RequestBook, source: RoutingSource, client_id: str) -> None:
        self._shares, self._book, self._source, self._client_id = shares, book, source, client_id
        self._is_quiet = True

    async def run(self) -> None:
        """Runs until cancelled. It calls no one while no request is in flight and nothing is left to tell."""
        while True:
            await asyncio.sleep(PERIOD_S)
            if len(self._book) or not self._is_quiet:
                await self.share()

    async def share(self) -> None:
        """One report, and its answer."""
        shares = self._shares
        charges = shares.take_usage()
        report = UsageReport(charges=charges, tenants=shares.active(), least_active=shares.least_active())
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                shared = await self._source.share_usage(self._client_id, report)
        except (EngineError, TimeoutError) as error:
            # Where the report came and its answer did not, what it says counts twice: too much, for one period.
            shares.return_usage(charges)
            logger.debug("usage could not be shared: %s", error or "no answer")
            return
        shares.merge(shared.counters, shared.least_active)
        self._is_quiet = not len(self._book)
