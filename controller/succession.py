"""A controller that another one has replaced stands by: should that one fall silent, it takes over again.

    acting --a newer term--> stands by --no sign of life for `STAND_BY_S`--> acting, with a term of its own

Otherwise the death of the newer one would leave an application whose only controller has ended its loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from pengserve.controller.loop import Controller
from pengserve.controller.terms import TermStore

logger = logging.getLogger(__name__)

STAND_BY_S = 60.0  # longer than a restart by Ray Serve takes
LOOK_S = 5.0  # between two looks for a sign of life


class Succession:
    """Runs one controller after the other in this process, of which at most one acts. `current` is the newest."""

    def __init__(
        self, make: Callable[[], Controller], store: TermStore, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`make` makes a controller that has no term yet."""
        self._make, self._store, self._clock = make, store, clock
        self.current = make()

    async def run(self) -> None:
        """Runs until the current controller is asked to stop."""
        while True:
            await self.current.run()
            if not self.current.is_superseded:
                return
            await self._stand_by()
            logger.warning("no controller has acted for %g s; this one takes over again", STAND_BY_S)
            self.current = self._make()

    async def _stand_by(self) -> None:
        """Returns when no controller has given a sign of life for `STAND_BY_S` in a store that answers."""
        known, since_s = "", self._clock()
        while self._clock() - since_s < STAND_BY_S:
            await asyncio.sleep(LOOK_S)
            try:
                sign = await self._store.sign_of_life()
            except Exception as error:
                logger.info("the store of terms does not answer: %s", error)
                since_s = self._clock()
                continue
            if sign != known:
                known, since_s = sign, self._clock()
