"""The SDK: `from pengserve.client import PengServe, AsyncPengServe`. Needs httpx alone."""

from pengserve.client.api import AsyncPengServe, PengServe
from pengserve.client.errors import PengServeAPIError, PengServeConnectionError, PengServeTimeoutError
from pengserve.client.protocol import Readiness
from pengserve.client.slo import Kept, Slo, kept_of
from pengserve.planners.types.errors import PengServeError

__all__ = [
    "AsyncPengServe",
    "Kept",
    "PengServe",
    "PengServeAPIError",
    "PengServeConnectionError",
    "PengServeError",
    "PengServeTimeoutError",
    "Readiness",
    "Slo",
    "kept_of",
]
