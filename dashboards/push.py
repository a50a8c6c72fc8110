"""Sends the dashboards to a Grafana server: `pengserve dashboards push http://grafana:3000`.

The token of a service account is read from `GRAFANA_TOKEN`. Needs `pip install pengserve[grafana]`; importing the JSON
files by hand needs nothing.
"""

import json
import os
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Protocol
from urllib.parse import urlsplit

from pengserve.dashboards import BACKENDS
from pengserve.planners.types.errors import ConfigError


class DashboardStore(Protocol):
    """What is needed of a Grafana client."""

    def save(self, model: dict[str, Any]) -> str:
        """Creates the dashboard or replaces the one of the same uid; returns its path on the server."""


class GrafanaServer:
    """A `DashboardStore` over the grafana-api package."""

    def __init__(self, url: str, token: str) -> None:
        """Prepares the client; nothing is sent yet.

        Raises:
            ConfigError: the url is none, or the package is not installed.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the Grafana address must be a URL like http://host:3000, got {url!r}")
        try:
            from grafana_api.grafana_face import GrafanaFace
        except ImportError as error:
            raise ConfigError("pushing dashboards needs the package: pip install 'pengserve[grafana]'") from error
        prefix = parts.path.strip("/") + "/" if parts.path.strip("/") else ""
        self._grafana = GrafanaFace(
            auth=token,
            host=parts.hostname,
            port=parts.port,
            url_path_prefix=prefix,
            protocol=parts.scheme,
            timeout=10.0,
        )

    def save(self, model: dict[str, Any]) -> str:
        """Creates or replaces it in the general folder."""
        given = {"dashboard": model, "folderId": 0, "overwrite": True, "message": "pengserve"}
        try:
            answer = self._grafana.dashboard.update_dashboard(given)
        except Exception as error:  # the package raises its own errors, and those of its HTTP client
            raise ConfigError(f"Grafana did not take the dashboard: {error}") from error
        return str(answer["url"])


def push(store: DashboardStore, backends: Sequence[str] = tuple(BACKENDS)) -> tuple[str, ...]:
    """Saves the shipped dashboards of `backends`; returns their paths."""
    return tuple(store.save(shipped(backend)) for backend in backends)


def shipped(backend: str) -> dict[str, Any]:
    """The dashboard of a metrics backend, as it comes with the package."""
    text = files("pengserve.dashboards").joinpath(BACKENDS[backend]).read_text(encoding="utf-8")
    model: dict[str, Any] = json.loads(text)
    return model


def run_push(url: str, backends: Sequence[str] = ()) -> list[str]:
    """Sends dashboards to a Grafana server, all where none is named; their addresses.

    Raises:
        ConfigError: `GRAFANA_TOKEN` is not set, the address is none, a backend is unknown, a package is missing, or the
            server refuses.
    """
    if unknown := sorted(set(backends) - set(BACKENDS)):
        raise ConfigError(f"--backend {unknown[0]}: one of {', '.join(BACKENDS)} is accepted")
    token = os.environ.get("GRAFANA_TOKEN", "")
    if not token:
        raise ConfigError("set GRAFANA_TOKEN to the token of a Grafana service account")
    paths = push(GrafanaServer(url, token), tuple(backends) or tuple(BACKENDS))
    return [f"{url.rstrip('/')}{path}" for path in paths]
