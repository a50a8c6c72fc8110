"""Who may see and steer the cluster: one who sends the admin key, or the cookie that a page has got for it."""

from starlette.datastructures import Headers

from pengserve.cluster.ingress.config import IngressConfig
from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.cluster.ingress.guards.keys import KeyRing
from pengserve.cluster.ingress.guards.own_machine import is_cross_site, refuse_foreign, require_json
from pengserve.cluster.ui.sessions import Sessions

KEY_HEADER = "x-pengserve-admin-key"


class AdminDoor:
    """The one check in front of `/cluster/...` and `/ui`."""

    def __init__(self, config: IngressConfig, keys: KeyRing) -> None:
        self._config, self._keys = config, keys
        self.sessions = Sessions(config.instance.channel_token, lambda: keys.admin)

    @property
    def has_key(self) -> bool:
        """Whether an admin key is set, so that there is something to sign in with."""
        return bool(self._keys.admin)

    def require(self, method: str, headers: Headers) -> None:
        """Lets a request pass, or refuses it.

        A browser sends a cookie by itself, so what comes with one alone must be of the server's own page.

        Raises:
            RequestRefused: 401 without a key; 403 where no key is set and the request does not come from this machine,
                or a page of another origin uses the cookie; 415 where such a page could have made a body.
        """
        if not self._keys.admin:
            if not self._config.is_loopback or self._keys.api:
                raise RequestRefused(403, "Cluster routes are closed until security.admin_key is set.")
            refuse_foreign(method, headers)
        elif not self._keys.admin.accept(headers.get(KEY_HEADER) or bearer(headers)):
            if not self.sessions.accept(headers.get("cookie", "")):
                raise RequestRefused(401, f"The admin key is needed: send it as `{KEY_HEADER}` or a bearer key.")
            if is_cross_site(headers):
                raise RequestRefused(403, "A page of another site may not use this cluster's cookie.")
            require_json(method, headers)


def bearer(headers: Headers) -> str:
    """The bearer key of a request; "" where it has none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
