"""Sends the dashboards to a Grafana server: `python -m dashboards.push http://grafana:3000`.

The token of a service account is read from `GRAFANA_TOKEN`. Needs `pip install pengserve[grafana]`; importing the JSON
files by hand needs nothing.
"""

import argparse
import os
import sys
from typing import Any, Protocol
from urllib.parse import urlsplit

from dashboards.build import BACKENDS, dashboard
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
        answer = self._grafana.dashboard.update_dashboard(
            {"dashboard": model, "folderId": 0, "overwrite": True, "message": "pengserve"}
        )
        return str(answer["url"])


def push(store: DashboardStore, backends: tuple[str, ...] = tuple(BACKENDS)) -> tuple[str, ...]:
    """Saves the dashboards of `backends`; returns their paths."""
    return tuple(store.save(dashboard(backend)) for backend in backends)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Send PengServe's dashboards to a Grafana server.")
    parser.add_argument("url", help="for example http://localhost:3000")
    parser.add_argument("--backend", choices=tuple(BACKENDS), action="append", help="metrics backend; all if not given")
    options = parser.parse_args(arguments)
    try:
        token = os.environ["GRAFANA_TOKEN"]
        paths = push(GrafanaServer(options.url, token), tuple(options.backend or BACKENDS))
    except KeyError:
        sys.stderr.write("set GRAFANA_TOKEN to the token of a Grafana service account\n")
        return 2
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("".join(f"{options.url.rstrip('/')}{path}\n" for path in paths))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
