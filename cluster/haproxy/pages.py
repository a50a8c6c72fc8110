"""What HAProxy answers where no ingress does, in the form of all other errors: JSON as OpenAI's clients read it.

HAProxy's 400 and 408, for what is no HTTP or comes too slowly, stay its own: it reads no file for them.
Standard library only: HAProxy's launcher imports this.
"""

import json
from http import HTTPStatus
from pathlib import Path

_RETRY_AFTER_S = 1
_FAILED = (500, "InternalServerError", "The proxy got no answer from the server.")
_NO_INGRESS = (
    503,
    "ServiceUnavailableError",
    "No ingress can be reached: the application starts, stops or was never deployed.",
)
_ANSWERS = {500: _FAILED, 502: _FAILED, 503: _NO_INGRESS, 504: _FAILED}  # 502 and 504 become 500, as Ray Serve has it


def write_error_pages(directory: str) -> dict[int, str]:
    """Write the pages into `directory`; their paths by the status that HAProxy found."""
    paths = {}
    for status, answer in _ANSWERS.items():
        path = Path(directory) / f"pengserve-{status}.http"
        path.write_bytes(_page(*answer))
        paths[status] = str(path)
    return paths


def _page(status: int, kind: str, message: str) -> bytes:
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}})
    head = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-cache",
        *([f"Retry-After: {_RETRY_AFTER_S}"] if status == 503 else []),
    ]
    return ("\r\n".join(head) + "\r\n\r\n" + body).encode()
