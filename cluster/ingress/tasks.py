"""Tasks that must outlive every fault of their own."""

import asyncio
import logging
from collections.abc import Callable, Coroutine

logger = logging.getLogger(__name__)

PAUSE_S = 1.0  # after a fault


async def forever(name: str, job: Callable[[], Coroutine[None, None, None]]) -> None:
    """Runs `job` again where a fault of ours ended it: an ingress without its tasks would be deaf."""
    while True:
        try:
            await job()
        except Exception:
            logger.exception("the ingress task %s failed; it is started again", name)
            await asyncio.sleep(PAUSE_S)
