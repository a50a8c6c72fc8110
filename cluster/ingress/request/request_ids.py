"""The id of a request: the client's own where it is fit for headers and logs, else a new one."""

import re
import secrets

HEADER = "x-request-id"
MAX_ID_CHARS = 128
_FIT = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:\-]{{0,{MAX_ID_CHARS - 1}}}")


def accept_or_make(given: str) -> str:
    """`given`, or a new id where that is missing, too long, or holds characters that do not belong into an id."""
    return given if _FIT.fullmatch(given) else secrets.token_hex(16)
