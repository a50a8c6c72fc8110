"""The routes of the live page: `/ui`, its files, signing in and out, and the stream that it draws.

The files hold no data of any cluster, and are open: a page to sign in needs its style. Every answer forbids scripts,
styles and connections of other origins.
"""

import hashlib
import mimetypes
from collections.abc import Callable
from importlib.resources import files
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.cluster.ingress.guards.admin import AdminDoor
from pengserve.cluster.ingress.guards.own_machine import is_cross_site
from pengserve.cluster.ui.feed import Feed
from pengserve.cluster.ui.stream import FeedResponse

PAGE = "/ui"
MAX_FORM_BYTES = 4096
ASSETS = ("page.css", "page.js", "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def ui_router(door: AdminDoor, feed: Feed, is_ending: Callable[[], bool]) -> APIRouter:
    """The routes. The guard has checked `/cluster/stream`; the page checks for itself, as it asks for a key."""
    router = APIRouter()
    texts = {name: _read(name) for name in ("page.html", "login.html", *ASSETS)}

    @router.get("/cluster/stream")
    async def stream(request: Request) -> Response:
        return FeedResponse(feed, feed.join(request.headers.get("last-event-id", "")), is_ending)

    @router.get(PAGE)
    async def page(request: Request) -> Response:
        try:
            door.require("GET", request.headers)
        except RequestRefused as refused:
            if refused.status != 401:
                raise
            return _html(texts["login.html"], 401)
        can_sign_out = b'data-key="yes"' if door.has_key else b'data-key="no"'
        return _html(texts["page.html"].replace(b'data-key="no"', can_sign_out))

    @router.post(f"{PAGE}/login")
    async def login(request: Request) -> Response:
        if is_cross_site(request.headers):
            raise RequestRefused(403, "A page of another site may not sign in here.")
        body = await request.body()
        if len(body) > MAX_FORM_BYTES:
            raise RequestRefused(413, f"The form has more than {MAX_FORM_BYTES} bytes.")
        keys = parse_qs(body.decode("utf-8", "replace"), max_num_fields=8).get("key", [""])
        cookie = door.sessions.open(keys[0].strip(), is_encrypted=_is_encrypted(request))
        if cookie is None:
            return _html(texts["login.html"].replace(b"<!-- why -->", b"This is not the admin key."), 401)
        return RedirectResponse(PAGE, 303, headers={**HEADERS, "Set-Cookie": cookie})

    @router.post(f"{PAGE}/logout")
    async def logout(request: Request) -> Response:
        if is_cross_site(request.headers):
            raise RequestRefused(403, "A page of another site may not sign out here.")
        cookie = door.sessions.end(is_encrypted=_is_encrypted(request))
        return RedirectResponse(PAGE, 303, headers={**HEADERS, "Set-Cookie": cookie})

    for name in ASSETS:
        router.add_api_route(f"{PAGE}/{name}", _asset(name, texts[name]), methods=["GET"])
    return router


def _asset(name: str, body: bytes) -> Callable[[Request], Response]:
    media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
    tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'

    async def asset(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={**HEADERS, "ETag": tag})
        return Response(body, media_type=media_type, headers={**HEADERS, "ETag": tag})

    return asset  # type: ignore[return-value]


def _read(name: str) -> bytes:
    return files("pengserve.cluster.ui").joinpath("static", name).read_bytes()


def _html(text: bytes, status: int = 200) -> Response:
    headers = {**HEADERS, "Cache-Control": "no-store"}
    return Response(text, status, media_type="text/html; charset=utf-8", headers=headers)


def _is_encrypted(request: Request) -> bool:
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto", ""))
