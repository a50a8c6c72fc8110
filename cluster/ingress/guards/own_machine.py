"""Whether a request without a key comes from a program of this machine: else it may not steer the cluster.

A loopback address keeps other machines out, and not what runs here in their name: a reverse proxy, a web page in a
browser, or a page whose name was pointed to 127.0.0.1 (DNS rebinding).
"""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from pengserve.cluster.ingress.errors import RequestRefused

_FORWARDING = frozenset({"forwarded", "via", "x-real-ip"})
_FORWARDING_PREFIX = "x-forwarded-"
_FOREIGN_SITES = frozenset({"cross-site", "same-site"})
_WRITING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_ADVICE = "set security.admin_key on the server and send it as `x-pengserve-admin-key`"


def refuse_foreign(method: str, headers: Headers) -> None:
    """Refuse what shows that it was forwarded or comes from a web page.

    Raises:
        RequestRefused: 403, or 415 where a body is not said to be JSON, as a page's form would send it.
    """
    for name in headers:
        if name in _FORWARDING or name.startswith(_FORWARDING_PREFIX):
            raise RequestRefused(403, f"Cluster routes without a key take no forwarded requests ({name}): {_ADVICE}.")
    host = headers.get("host")
    if host is not None and not _is_loopback(host):
        raise RequestRefused(403, f"Cluster routes without a key answer to 127.0.0.1 and localhost alone: {_ADVICE}.")
    if is_cross_site(headers):
        raise RequestRefused(403, f"Cluster routes without a key take no requests of web pages: {_ADVICE}.")
    require_json(method, headers)


def is_cross_site(headers: Headers) -> bool:
    """Whether a browser says that a page of another origin than the one it asks has made the request."""
    origin = headers.get("origin")
    is_foreign = origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()
    return is_foreign or headers.get("sec-fetch-site", "") in _FOREIGN_SITES


def require_json(method: str, headers: Headers) -> None:
    """Refuses a body that a form of another page could send.

    Raises:
        RequestRefused: 415, the request writes and does not say that its body is JSON.
    """
    if method in _WRITING and headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise RequestRefused(415, "Content-Type must be application/json.", param="Content-Type")


def _is_loopback(host: str) -> bool:
    """Whether a `Host` header, with or without a port, names this machine alone."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
