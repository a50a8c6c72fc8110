"""A page's cookie: it stands for an admin key, on every ingress of one application, until the key or the time ends."""

from http.cookies import SimpleCookie

import pytest

from pengserve.cluster.ingress.guards.keys import Keys
from pengserve.cluster.ui.sessions import LIFETIME_S, Sessions


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def cookie(header: str) -> str:
    """What a browser sends for a `Set-Cookie` header."""
    ((name, morsel),) = SimpleCookie(header).items()
    return f"{name}={morsel.value}"


def sessions(*keys: str, secret: str = "a", clock: Clock | None = None) -> Sessions:
    return Sessions(secret, lambda: Keys(keys), clock=clock or Clock())


def test_a_key_opens_a_session_that_other_ingresses_accept() -> None:
    header = sessions("k").open("k", is_encrypted=False)
    assert header is not None
    assert "HttpOnly" in header and "SameSite=Strict" in header and "Secure" not in header and "Path=/" in header
    assert "k" not in cookie(header).partition("=")[2].split(".")
    assert sessions("k").accept(cookie(header)) and sessions("new", "k").accept(f"x=1; {cookie(header)}")
    assert "; Secure" in (sessions("k").open("k", is_encrypted=True) or "")


def test_a_session_ends_with_its_key_its_time_and_its_application() -> None:
    clock = Clock()
    header = sessions("k", clock=clock).open("k", is_encrypted=False) or ""
    assert not sessions("other").accept(cookie(header))
    assert not sessions("k", secret="b").accept(cookie(header))
    other = sessions("k", secret="b")
    renamed = f"{other.cookie_name}={cookie(header).partition('=')[2]}"
    assert not other.accept(renamed)
    clock.now_s += LIFETIME_S + 2
    assert not sessions("k", clock=clock).accept(cookie(header))


def test_a_wrong_key_opens_nothing() -> None:
    assert sessions("k").open("x", is_encrypted=False) is None
    assert sessions("k").open("", is_encrypted=False) is None
    assert sessions().open("", is_encrypted=False) is None


@pytest.mark.parametrize("change", ["{0}x", "9{0}", "{0}.", "", ".", "..", "9999999999..", "é", "9" * 300, "\x00"])
def test_a_made_up_cookie_is_refused(change: str) -> None:
    opened = sessions("k")
    value = cookie(opened.open("k", is_encrypted=False) or "").partition("=")[2]
    assert not opened.accept(f"{opened.cookie_name}={change.format(value)}")
    assert not opened.accept(change.format(value))


def test_signing_out_forgets_the_cookie() -> None:
    assert "Max-Age=0" in sessions("k").end(is_encrypted=False)
