"""Why an application does not start, told at once to the command that waits for it.

Ray Serve tries a constructor that raises three times and then says which deployment failed, without the cause. The
processes of an application leave the cause here, in Ray's key-value store, and `pengserve up` looks for it while it
waits.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from pengserve.replicas.failures import told_failure

NAMESPACE = "pengserve"

logger = logging.getLogger(__name__)


@contextmanager
def told_at_once(app: str) -> Iterator[None]:
    """An exception that leaves the block is left for `told`, and goes on."""
    try:
        yield
    except Exception as error:
        tell(app, told_failure(error))
        raise


def tell(app: str, why: str) -> None:
    """Leaves the cause of a failure; the first one stands."""
    try:
        _internal_kv_put(_key(app), why, overwrite=False, namespace=NAMESPACE)
    except Exception:  # the failure itself is raised: this must not take its place
        logger.exception("cannot tell why the application does not start: %s", why)


def told(app: str) -> str:
    """What was left; empty where nothing was."""
    value: bytes | None = _internal_kv_get(_key(app), namespace=NAMESPACE)
    return value.decode() if value else ""


def forget(app: str) -> None:
    """Forgets what an earlier deployment left."""
    _internal_kv_del(_key(app), namespace=NAMESPACE)


def _key(app: str) -> str:
    return f"pengserve:{app}:start-failure"
