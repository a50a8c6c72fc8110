"""What a client call raises, under the project's one tree.

PengServeError
+-- PengServeAPIError            the server refused the request
+-- PengServeConnectionError     no server answered at that address, or the connection broke
+-- PengServeTimeoutError        the cluster did not reach the expected state in time
"""

from pengserve.planners.types.errors import PengServeError


class PengServeAPIError(PengServeError):
    """The server refused a request.

    `request_id` is what to look for in the server's log; empty where the answer carried none.
    """

    def __init__(self, status_code: int, message: str, request_id: str = "") -> None:
        super().__init__(message)
        self.status_code = status_code
        self.message = message
        self.request_id = request_id

    def __str__(self) -> str:
        tail = f", request {self.request_id}" if self.request_id else ""
        return f"{self.message} (HTTP {self.status_code}{tail})"


class PengServeConnectionError(PengServeError):
    """No server answered at the address, or the connection broke before the answer was complete."""


class PengServeTimeoutError(PengServeError):
    """What was waited for did not happen in time. The message says what was still missing."""
