"""A page's cookie: what a browser has in place of the admin key, which it cannot put on a stream of events.

    pengserve_3f2a...=1795263698.Ab3...9f     when it ends, a random word, and a seal over both

The seal is made with an admin key and the application's secret. So every ingress of the application accepts it, no
store is needed, and it ends with the key that opened it. Its name has the cluster's, as cookies know no ports.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

from starlette.requests import cookie_parser

from pengserve.cluster.ingress.guards.keys import Keys
from pengserve.planners.types.cluster_id import cluster_id

LIFETIME_S = 12 * 3600
_MAX_CHARS = 256


class Sessions:
    """Makes and checks cookies."""

    def __init__(self, secret: str, admin_keys: Callable[[], Keys], *, clock: Callable[[], float] = time.time) -> None:
        """`secret` is the application's own; `admin_keys` gives those that count now."""
        self.cookie_name = f"pengserve_{cluster_id(secret)[:8]}"
        self._secret = hashlib.sha256(f"pengserve page {secret}".encode()).digest()
        self._admin_keys, self._clock = admin_keys, clock

    def open(self, key: str, *, is_encrypted: bool) -> str | None:
        """The `Set-Cookie` header of one who has sent an admin key; None where `key` is none."""
        digest = self._admin_keys().find(key)
        if digest is None:
            return None
        text = f"{int(self._clock()) + LIFETIME_S}.{secrets.token_urlsafe(16)}"
        return self._header(f"{text}.{self._seal(digest, text)}", LIFETIME_S, is_encrypted)

    def end(self, *, is_encrypted: bool) -> str:
        """The `Set-Cookie` header that makes a browser forget its cookie."""
        return self._header("", 0, is_encrypted)

    def accept(self, cookies: str) -> bool:
        """Whether a `Cookie` header has a cookie that was made here, with a key that still counts."""
        value = cookie_parser(cookies).get(self.cookie_name, "") if cookies else ""
        text, _, seal = value.rpartition(".")
        ends_s = text.partition(".")[0]
        if len(value) > _MAX_CHARS or not ends_s.isascii() or not ends_s.isdecimal() or int(ends_s) < self._clock():
            return False
        found = False
        for digest in self._admin_keys().digests:
            found |= hmac.compare_digest(seal.encode(), self._seal(digest, text).encode())
        return found

    def _seal(self, digest: bytes, text: str) -> str:
        return hmac.new(self._secret + digest, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()

    def _header(self, value: str, seconds: int, is_encrypted: bool) -> str:
        secure = "; Secure" if is_encrypted else ""
        return f"{self.cookie_name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"
