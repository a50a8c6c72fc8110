"""What one connection, and one source of connections, may take of the HTTP port.

The fields are settings of the section `http`. Serve's proxies start before any application and know no settings, so
the values reach them by the variables of those settings, which `pengserve up` sets and `ray start` inherits.

Standard library only: HAProxy's launcher imports this.
"""

import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HEADER_TIMEOUT_VARIABLE = "PENGSERVE_HTTP__HEADER_TIMEOUT_S"
CLIENT_TIMEOUT_VARIABLE = "PENGSERVE_HTTP__CLIENT_TIMEOUT_S"
PER_SOURCE_VARIABLE = "PENGSERVE_HTTP__MAX_CONNECTIONS_PER_SOURCE"
TRUSTED_VARIABLE = "PENGSERVE_HTTP__TRUSTED_SOURCES"

MAX_TIMEOUT_S = 3600
MAX_PER_SOURCE = 1_000_000
LOOPBACK_SOURCES = ("127.0.0.0/8", "::1/128")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of connections to the HTTP port."""

    header_timeout_s: int = 10  # until all headers of a request have arrived
    client_timeout_s: int = 60  # without a byte from a client that sends, or to a client that should read
    max_connections_per_source: int = 2048  # from one IPv4 address or one /64 of IPv6 at the same time
    trusted_sources: tuple[str, ...] = LOOPBACK_SOURCES  # networks that the limit per source leaves out

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "ConnectionLimits":
        """The limits that variables name; defaults for the others.

        Raises:
            ValueError: names the variable and what is accepted.
        """
        defaults = cls()
        return cls(
            header_timeout_s=_number(
                environment, HEADER_TIMEOUT_VARIABLE, defaults.header_timeout_s, most=MAX_TIMEOUT_S
            ),
            client_timeout_s=_number(
                environment, CLIENT_TIMEOUT_VARIABLE, defaults.client_timeout_s, most=MAX_TIMEOUT_S
            ),
            max_connections_per_source=_number(
                environment, PER_SOURCE_VARIABLE, defaults.max_connections_per_source, most=MAX_PER_SOURCE
            ),
            trusted_sources=_sources(environment.get(TRUSTED_VARIABLE), defaults.trusted_sources),
        )

    def to_environment(self) -> dict[str, str]:
        """Variables from which `from_environment` makes the same limits."""
        return {
            HEADER_TIMEOUT_VARIABLE: str(self.header_timeout_s),
            CLIENT_TIMEOUT_VARIABLE: str(self.client_timeout_s),
            PER_SOURCE_VARIABLE: str(self.max_connections_per_source),
            TRUSTED_VARIABLE: json.dumps(self.trusted_sources),
        }


def parse_sources(values: Sequence[str]) -> tuple[str, ...]:
    """Networks in their usual form, an address being a network of one.

    Raises:
        ValueError: names the value that is none.
    """
    networks = []
    for value in values:
        try:
            networks.append(str(ipaddress.ip_network(value, strict=False)))
        except ValueError:
            raise ValueError(
                f'{value!r} is no network: give an address or a network, such as "10.1.2.3" or "10.0.0.0/8"'
            ) from None
    return tuple(networks)


def _number(environment: Mapping[str, str], name: str, default: int, *, most: int) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or not 1 <= int(text[:9]) <= most:
        raise ValueError(f"{name}: a whole number from 1 to {most} is accepted, got {text!r}")
    return int(text)


def _sources(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    if not text or not text.strip():
        return default
    try:
        values = json.loads(text)
    except ValueError:
        values = [text.strip()]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"""{TRUSTED_VARIABLE}: a list of networks is accepted, such as '["10.0.0.0/8"]'""")
    try:
        return parse_sources(values)
    except ValueError as error:
        raise ValueError(f"{TRUSTED_VARIABLE}: {error}") from None
