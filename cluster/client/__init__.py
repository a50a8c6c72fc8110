"""The SDK: `from pengserve.client import PengServe, AsyncPengServe`. Needs httpx alone."""

from pengserve.client.api import AsyncPengServe, PengServe
from pengserve.client.errors import PengServeAPIError, PengServeConnectionError, PengServeTimeoutError
from pengserve.client.protocol import Readiness
from pengserve.planners.types.errors import PengServeError

__all__ = [
    "AsyncPengServe",
    "PengServe",
    "PengServeAPIError",
    "PengServeConnectionError",
    "PengServeError",
    "PengServeTimeoutError",
    "Readiness",
]
